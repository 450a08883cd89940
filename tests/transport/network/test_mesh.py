"""The connections to ranks on other machines: what their thread accepts, refuses and detects."""

from __future__ import annotations

import os
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator

import pytest

from builds import LONG
from deep_ep_py.base.native import C
from native_programs import build_protocol, run

pytestmark = pytest.mark.timeout(60)

State = C.Mesh.State
BEAT, MESSAGE = 1, 5
KEYS = (bytes(range(16)), bytes(range(16, 32)))


def mesh_of(*ends: tuple[int, socket.socket, str], keys: tuple[bytes, bytes] = KEYS) -> C.Mesh:
    mesh = C.Mesh(
        [
            C.Mesh.End(rank=rank, socket=end.fileno(), machine=machine, own=keys[0], theirs=keys[1])
            for rank, end, machine in ends
        ]
    )
    for _, end, _ in ends:
        end.close()
    return mesh


class Rank:
    """The remote end of a connection, driven by the test."""

    def __init__(self) -> None:
        self.end, self.socket = socket.socketpair()
        self._sent = 0

    def frame(self, kind: int, payload: bytes = b"", number: int | None = None) -> bytes:
        head = struct.pack("=IIQ", len(payload), kind, self._sent if number is None else number)
        self._sent += 1
        return head + payload + C.tag(KEYS[1], head + payload)

    def say(self, kind: int, payload: bytes = b"") -> None:
        self.socket.sendall(self.frame(kind, payload))


@pytest.fixture
def rank() -> Iterator[Rank]:
    one = Rank()
    yield one
    one.socket.close()


def wait_for(what: Callable[[], bool], seconds: float = 10.0) -> float:
    began = time.monotonic()
    while not what():
        assert time.monotonic() - began < seconds
        time.sleep(0.005)
    return time.monotonic() - began


def test_tags_are_those_of_the_reference() -> None:
    """The first 128-bit test vectors of SipHash's authors."""
    texts = [bytes(range(count)) for count in range(3)]
    assert [C.tag(KEYS[0], text).hex() for text in texts] == [
        "a3817f04ba25a8e66df67214c7550293",
        "da87c1d86b99af44347659119b22fc45",
        "8177228da4a45dc7fca38bdef60affe4",
    ]


def test_messages_come_in_order_and_whole() -> None:
    ends = socket.socketpair()
    ours, theirs = mesh_of((1, ends[0], "b")), mesh_of((0, ends[1], "a"), keys=(KEYS[1], KEYS[0]))
    sent = [os.urandom(count) for count in (0, 1, 7, 8, 100, 65536, 65536, 3)]
    for message in sent:
        ours.send(1, message)
    came: list[bytes] = []
    while len(came) < len(sent):
        theirs.clear_news()
        while (message := theirs.receive(0)) is not None:
            came.append(message)
        assert len(came) == len(sent) or theirs.has_news(0) or select.select([theirs.news], [], [], 10)[0]
    assert came == sent


@pytest.mark.parametrize("wrong", ["another tag", "sent again", "left out", "too long", "the other direction's key"])
def test_what_no_rank_sends_ends_the_connection(rank: Rank, wrong: str) -> None:
    """It was injected into the connection, so nothing after it is accepted either."""
    mesh = mesh_of((1, rank.end, "b"))
    rank.say(MESSAGE, b"good")
    wait_for(lambda: mesh.has_news(1))
    frame = rank.frame(MESSAGE, b"bad")
    if wrong == "another tag":
        frame = frame[:-1] + bytes([frame[-1] ^ 1])
    elif wrong == "sent again":
        frame = rank.frame(MESSAGE, b"bad", number=0)
    elif wrong == "left out":
        frame = rank.frame(MESSAGE, b"bad", number=2)
    elif wrong == "too long":
        frame = struct.pack("=IIQ", 1 << 17 | 1, MESSAGE, 1)
    else:
        frame = frame[:-16] + C.tag(KEYS[0], frame[:-16])
    rank.socket.sendall(frame)
    wait_for(lambda: mesh.state(1) == State.ENDED)
    assert mesh.receive(1) == b"good" and mesh.receive(1) is None


def test_beats_come_and_an_end_is_seen_at_once(rank: Rank) -> None:
    mesh = mesh_of((1, rank.end, "b"))
    rank.socket.settimeout(10)
    began = time.monotonic()
    for number in range(3):
        head = rank.socket.recv(16, socket.MSG_WAITALL)
        assert struct.unpack("=IIQ", head) == (0, BEAT, number)
        assert rank.socket.recv(16, socket.MSG_WAITALL) == C.tag(KEYS[0], head)
    assert time.monotonic() - began > 1.5
    assert mesh.state(1) == State.HEARD
    rank.say(MESSAGE, b"last")
    rank.socket.close()
    assert wait_for(lambda: mesh.state(1) == State.ENDED) < 0.5
    assert mesh.receive(1) == b"last"


@pytest.mark.long
@pytest.mark.skipif(not LONG, reason="waits for seconds: in `make test-long`")
@pytest.mark.timed
def test_a_machine_is_silent_when_all_its_ranks_are() -> None:
    """A machine is not silent if one rank is stopped while others of it are heard, nor if a rank has not sent yet."""
    silent, stopped, heard, meeting = Rank(), Rank(), Rank(), Rank()
    mesh = mesh_of((1, silent.end, "b"), (2, stopped.end, "c"), (3, heard.end, "c"), (4, meeting.end, "d"))
    for one in (silent, stopped, heard):
        one.say(BEAT)
    began, at = time.monotonic(), None
    while time.monotonic() - began < 8:
        heard.say(BEAT)
        time.sleep(0.5)
        if at is None and mesh.state(1) != State.HEARD:
            at = time.monotonic() - began
    assert at is not None and C.SILENT_SECONDS <= at < C.SILENT_SECONDS + 2
    assert [mesh.state(rank) for rank in (1, 2, 3, 4)] == [State.SILENT, State.HEARD, State.HEARD, State.HEARD]


@pytest.mark.timeout(600)  # this test may be the first to compile the scenarios
@pytest.mark.scenarios
def test_what_hosts_tell_each_other() -> None:
    """A failure is known everywhere before the rank that reports it continues; a stage arrives after its mask and the
    address before it; a rank that has left is not considered dead; forged frames have no effect.
    """
    for seed in range(1, 6):
        result = run(build_protocol(), "machines", str(seed))
        assert result.returncode == 0, f"seed {seed}\n{result.stderr}"


def test_a_rank_is_let_go(rank: Rank) -> None:
    mesh = mesh_of((1, rank.end, "b"))
    mesh.send(1, b"the last")
    mesh.drop(1)
    wait_for(lambda: mesh.state(1) == State.ENDED)
    rank.socket.settimeout(10)
    received = b""
    while more := rank.socket.recv(1024):
        received += more
    assert b"the last" in received, "a message sent earlier did not leave"
    mesh.drop(1)
    mesh.send(1, b"too late")
