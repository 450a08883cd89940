"""The private sockets of the ranks carry plain values, and descriptors without making one rank wait for another."""

from __future__ import annotations

import fcntl
import os
import pickle
import re
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from deep_ep_py import DeepEPError
from deep_ep_py.transport.bootstrap import start
from deep_ep_py.transport.bootstrap.connections import Connections
from deep_ep_py.transport.bootstrap.start import connect

pytestmark = pytest.mark.once
RANKS = 3
PIECE = 1 << 20


class Meeting:
    """Ranks that are threads but treat each other as processes."""

    in_process = False

    def __init__(self, rank: int, values: dict[tuple[int, int], Any], barrier: threading.Barrier) -> None:
        self.rank, self.size, self._values, self._barrier = rank, RANKS, values, barrier
        self._turn = 0

    def all_gather(self, value: Any) -> list[Any]:
        self._turn += 1
        self._values[self._turn, self.rank] = value
        self._barrier.wait()
        return [self._values[self._turn, rank] for rank in range(RANKS)]


def make_connections(meanwhile: Callable[[], Any] | None = None) -> list[Connections]:
    """Let the ranks meet; `meanwhile` is called when all of them listen and none has connected."""
    values, barrier = dict[tuple[int, int], Any](), threading.Barrier(RANKS, meanwhile)
    with ThreadPoolExecutor(RANKS) as threads:
        met = list(threads.map(lambda rank: connect(Meeting(rank, values, barrier)), range(RANKS)))
    return [one for one in met if isinstance(one, Connections)]


# A process may have set a default timeout for all its sockets.
@pytest.fixture(params=[None, 60.0], ids=["no-timeout", "timeout"])
def ranks(request: pytest.FixtureRequest) -> Iterator[list[Connections]]:
    socket.setdefaulttimeout(request.param)
    try:
        made = make_connections()
    finally:
        socket.setdefaulttimeout(None)
    yield made
    for one in made:
        one.close()


@pytest.fixture
def descriptor() -> Iterator[int]:
    opened = os.memfd_create("piece")
    yield opened
    os.close(opened)


@pytest.mark.timeout(60)
def test_a_rank_that_does_not_read_keeps_no_rank_waiting(ranks: list[Connections], descriptor: int) -> None:
    """If a socket is full, the piece must be handed over again, to that rank only."""
    owner, reader, other = ranks
    handed = 0
    while owner.hand_over((handed * PIECE + PIECE, PIECE), descriptor):
        handed += 1
        if handed % 2 == 0:  # this rank reads
            take(other, handed - 2), take(other, handed - 1)
        assert handed < 100_000
    if handed % 2:
        take(other, handed - 1)
    take(other, handed)
    assert not owner.hand_over((handed * PIECE + PIECE, PIECE), descriptor)
    for number in range(handed):
        take(reader, number)
    assert owner.hand_over((handed * PIECE + PIECE, PIECE), descriptor)
    take(reader, handed)
    for one in (reader, other):
        with pytest.raises(DeepEPError, match="has announced memory that it has not handed over"):
            one.next_piece(owner.rank)


def take(reader: Connections, number: int) -> None:
    piece, _ = reader.next_piece(0)
    assert piece == (number * PIECE + PIECE, PIECE)
    reader.drop_piece(0)


WHY = "a heap of 8 bytes cannot be allocated"


@pytest.mark.parametrize(
    ("failed", "raised"), [(DeepEPError(WHY), DeepEPError), (TypeError(WHY), ValueError), (MemoryError(), DeepEPError)]
)
def test_a_rank_that_leaves_tells_the_others_why(
    ranks: list[Connections], failed: Exception, raised: type[Exception]
) -> None:
    """The last one hears it also from a rank that leaves for this reason."""
    check_told(ranks, failed, raised)


def test_what_others_are_told_is_cut(ranks: list[Connections]) -> None:
    """A message has a limit, and a part of one is none."""
    ranks[1].leave(DeepEPError("no path: " + "\0" * 100_000))
    with pytest.raises(DeepEPError, match="^rank 1: no path: "):
        ranks[0].all_gather(None)


@pytest.mark.parametrize("machines", [(0, 1, 2), (0, 0, 1), (0, 1, 0), (0, 1, 1)])
def test_a_rank_that_leaves_tells_ranks_on_other_machines_why(
    machines: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = threading.local()
    monkeypatch.setattr(start, "machine_name", lambda: f"machine {machines[own.rank]}")
    monkeypatch.setenv("DEEP_EP_ADDRESS", "127.0.0.1")
    values, barrier = dict[tuple[int, int], Any](), threading.Barrier(RANKS)

    def meet(rank: int) -> Connections:
        own.rank = rank
        return connect(Meeting(rank, values, barrier))

    with ThreadPoolExecutor(RANKS) as threads:
        check_told(list(threads.map(meet, range(RANKS))), DeepEPError(WHY), DeepEPError)


def check_told(ranks: list[Connections], failed: Exception, raised: type[Exception]) -> None:
    said = f"^rank 1: {re.escape(str(failed) or repr(failed))}$"
    ranks[1].leave(failed)
    with pytest.raises(raised, match=said) as info:
        ranks[0].all_gather(None)
    ranks[0].leave(info.value)
    with pytest.raises(raised, match=said):
        ranks[2].all_gather(None)
    ranks[2].close()


@pytest.mark.timeout(60)
def test_what_is_not_there_is_not_waited_for(ranks: list[Connections]) -> None:
    began = time.monotonic()
    with pytest.raises(DeepEPError, match="rank 1: rank 0 has announced memory that it has not handed over"):
        ranks[1].next_piece(0)
    assert time.monotonic() - began < 10


def test_a_rank_that_is_gone_does_not_stop_handing_over(ranks: list[Connections], descriptor: int) -> None:
    ranks[1].close()
    assert ranks[0].hand_over((PIECE, PIECE), descriptor)
    take(ranks[2], 0)


def test_descriptors_end_with_this_program(ranks: list[Connections], descriptor: int) -> None:
    """Received descriptors are not inherited by programs that this process starts."""
    assert ranks[0].hand_over((PIECE, PIECE), descriptor)
    received = [ranks[1].next_piece(0)[1]]
    exchanged = exchange(ranks, descriptor)
    received += [one for theirs in exchanged for one in theirs.values()]
    assert len(received) == 1 + RANKS * (RANKS - 1)
    assert [fcntl.fcntl(one, fcntl.F_GETFD) for one in received] == [fcntl.FD_CLOEXEC] * len(received)
    for one in received[1:]:
        os.close(one)


def exchange(ranks: list[Connections], descriptor: int) -> list[dict[int, int]]:
    with ThreadPoolExecutor(RANKS) as threads:
        return list(threads.map(lambda one: one.exchange_descriptors(descriptor), ranks))


@pytest.mark.timeout(60)
def test_messages_wait_for_room(ranks: list[Connections]) -> None:
    """A message for all ranks is sent no matter how slowly they read."""
    turns = 2000
    with ThreadPoolExecutor(1) as thread:
        sent = thread.submit(lambda: [ranks[0]._send(b"message %d" % turn) for turn in range(turns)])
        time.sleep(0.5)
        assert not sent.done(), "expected more than a socket holds"
        connections = [one._incoming[0] for one in ranks[1:]]
        for connection in connections:
            connection.setblocking(True)
        for turn in range(turns):
            assert [connection.recv(64) for connection in connections] == [b"message %d" % turn] * len(connections)
        sent.result()


def test_too_many_open_files(ranks: list[Connections], descriptor: int) -> None:
    """If the kernel drops a descriptor, the error names the memory that it was for."""
    for one in ranks[1:]:
        one._send(b"descriptor", [descriptor])
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    first_free = os.dup(descriptor)
    os.close(first_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (first_free, limits[1]))
    try:
        with pytest.raises(DeepEPError, match=r"rank 0: memory of rank \d cannot be mapped: too many files are open"):
            ranks[0].exchange_descriptors(descriptor)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.timeout(60)
def test_a_process_that_has_ended_is_missed_though_another_one_has_its_sockets(ranks: list[Connections]) -> None:
    """The end of a process is detected by the process itself, not by its sockets, which may have been passed on or may
    belong to a forked child."""
    ended = subprocess.Popen([sys.executable, "-c", ""])

    for one in ranks[:2]:
        os.close(one._processes[2])
        one._processes[2] = os.pidfd_open(ended.pid)
    ended.wait()
    began = time.monotonic()
    with ThreadPoolExecutor(2) as threads:
        waiting = [threads.submit(one.all_gather, None) for one in ranks[:2]]
        for rank, one in enumerate(waiting):
            with pytest.raises(DeepEPError, match=rf"rank {rank}: rank 2's process \(pid \d+\) has died"):
                one.result()
    assert time.monotonic() - began < 10


class MakesFile:
    """An object that creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str, str]]:
        return open, (str(self.path), "w")


def test_a_pickle_is_not_executed(ranks: list[Connections], tmp_path: Path) -> None:
    """Not even one that a rank has sent."""
    for one in ranks[1:]:
        one._send(pickle.dumps(MakesFile(tmp_path / "made")))
    with pytest.raises(DeepEPError, match=r"rank 0: rank \d is in another exchange: it sent no value"):
        ranks[0].all_gather(None)
    assert not (tmp_path / "made").exists()


def test_what_is_said_is_plain(ranks: list[Connections]) -> None:
    """Values are JSON: others are refused before anything is sent, and received data is never executed."""
    values = [None, {"name": "peer", "bytes": 1 << 40, "on": True}, "rank 2"]
    with ThreadPoolExecutor(RANKS) as threads:
        for own in threads.map(lambda one: one.all_gather(values[one.rank]), ranks):
            assert own == values
    with pytest.raises(TypeError):
        ranks[0].all_gather(object())
    with pytest.raises(ValueError, match="expected at most 65536 bytes"):
        ranks[0].all_gather("x" * (1 << 16))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("what", ["pickles", "is silent", "fills the backlog", "goes on filling it"])
def test_a_stranger_who_connects_first(what: str, workers: Path, tmp_path: Path) -> None:
    """A process of the same user, the only property that a socket reveals: the ranks meet without it, undisturbed."""
    made = tmp_path / "made"
    command = [sys.executable, str(workers / "stranger.py"), what, str(os.getpid()), str(RANKS), str(made)]
    strangers = []

    def start() -> None:
        strangers.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        assert strangers[0].stdout.readline() == b"ready\n"

    try:
        ranks = make_connections(start)
        began = time.monotonic()
        with ThreadPoolExecutor(RANKS) as threads:
            gathered = list(threads.map(lambda one: one.all_gather(one.rank), ranks))
        assert gathered == [list(range(RANKS))] * RANKS
        assert strangers[0].poll() is None and time.monotonic() - began < 5
    finally:
        for stranger in strangers:
            stranger.communicate(b"")
    assert not made.exists(), "a stranger's pickle was executed"
    for one in ranks:
        one.close()


@pytest.mark.parametrize("alike", [True, False], ids=["one_namespace", "other_namespaces"])
def test_whose_death_it_was_before_all_have_met(alike: bool) -> None:
    """A rank lets go because the process of another rank has died, and this rank has met neither. It must not blame a
    process that is alive, and if pids mean the same to all ranks, it names the one that has died."""
    lives = subprocess.Popen(["sleep", "60"])
    dead = subprocess.Popen(["true"])
    dead.wait()
    connections = Connections(0, 3, [os.getpid(), dead.pid, lives.pid], range(3) if alike else ())
    try:
        with pytest.raises(DeepEPError) as info:
            connections._raise_gone(2)
        if alike:
            assert str(info.value) == f"rank 0: rank 1's process (pid {dead.pid}) has died"
        else:
            assert str(info.value) == (
                f"rank 0: rank 2 has closed the Buffer, or its process (pid {lives.pid}) has died"
            )
    finally:
        connections.close()
        lives.kill()
        lives.wait()


def test_a_rank_that_was_left_out_is_not_blamed_again() -> None:
    """A rank that died earlier was left out by a recovery; now another rank lets go."""
    lives = subprocess.Popen(["sleep", "60"])
    dead = subprocess.Popen(["true"])
    dead.wait()
    connections = Connections(0, 3, [os.getpid(), dead.pid, lives.pid], range(3))
    try:
        connections.drop([1])
        with pytest.raises(DeepEPError) as info:
            connections._raise_gone(2)
        assert str(info.value) == "rank 0: rank 2 has closed the Buffer"
    finally:
        connections.close()
        lives.kill()
        lives.wait()
