"""How ranks on different machines tell each other from strangers at a port that any machine can connect to."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from deep_ep_py import DeepEPError
from deep_ep_py.base.environment import ADDRESS
from deep_ep_py.transport.bootstrap import machine_rendezvous, machines
from deep_ep_py.transport.bootstrap.handshake import CONNECTOR, PeerGone, PeersLate, Session
from deep_ep_py.transport.bootstrap.machine_rendezvous import MachineRendezvous, Met, Place
from deep_ep_py.transport.bootstrap.machines import listen_at, own_address

pytestmark = [pytest.mark.once, pytest.mark.timeout(60)]

HERE = "127.0.0.1"
NONCE = bytes(range(32))


def hello(rank: int, magic: bytes = b"deep_ep1") -> bytes:
    return struct.pack("=8si32s", magic, rank, NONCE)


class Stranger:
    """A client that connects to the port of a rank without knowing the secret."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection((HERE, port), 10)

    def say(self, message: bytes, count: int = 1024) -> bytes:
        """Return the answer, which is empty if the connection is dropped."""
        try:
            self.socket.sendall(message)
            return self.socket.recv(count, socket.MSG_WAITALL)
        except ConnectionError:
            return b""


def meet(
    secrets: list[bytes],
    meanwhile: Callable[[list[int]], Any] = lambda _: None,
    late: int = 0,
    seconds: float = 10.0,
) -> list[Any]:
    """Let ranks meet, each as if on its own machine; one comes late, after a stranger has acted on the ports of
    all.

    Returns for each rank the connections it made or the exception it raised.
    """
    listeners, ports = zip(*(listen_at(HERE) for _ in secrets), strict=True)
    outcomes: list[Any] = [None] * len(secrets)

    def run(rank: int) -> None:
        places = [Place(peer, HERE, port) for peer, port in enumerate(ports) if peer != rank]
        try:
            outcomes[rank] = MachineRendezvous(rank, listeners[rank], places, secrets[rank], {}).run(seconds)
        except Exception as error:
            outcomes[rank] = error
        finally:
            listeners[rank].close()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(secrets))]
    for thread in (*threads[:late], *threads[late + 1 :]):
        thread.start()
    meanwhile(list(ports))
    threads[late].start()
    for thread in threads:
        thread.join()
    return outcomes


def check_met(outcomes: list[Any]) -> None:
    """Check that all ranks have met, each pair on one connection with a key per direction; close the connections."""
    assert all(isinstance(one, dict) for one in outcomes), outcomes
    keys = set()
    for rank, met in enumerate(outcomes):
        assert sorted(met) == [peer for peer in range(len(outcomes)) if peer != rank]
        for peer, one in met.items():
            other: Met = outcomes[peer][rank]
            assert one.own == other.theirs and one.theirs == other.own
            keys |= {one.own, one.theirs}
            one.socket.setblocking(True)
            one.socket.sendall(b"%d" % rank)
    for met in outcomes:
        for peer, one in met.items():
            assert one.socket.recv(9) == b"%d" % peer
            one.socket.close()
    assert len(keys) == len(outcomes) * (len(outcomes) - 1), "a key is used twice"


def test_all_meet_all() -> None:
    check_met(meet([b"secret"] * 5))


def test_strangers_are_refused_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    secret = os.urandom(32)

    def pretend(ports: list[int]) -> None:
        port = ports[1]
        assert Stranger(port).say(b"GET / HTTP/1.1\r\nHost: example\r\n\r\n" + bytes(64)) == b""
        assert Stranger(port).say(hello(0, magic=b"deep_ep0")) == b""
        for wrong in (-1, 1, 2, 7):  # itself, a rank that it connects to, or no rank at all
            assert Stranger(port).say(hello(wrong)) == b""
        first, second = Stranger(port), Stranger(port)
        answer = first.say(hello(0), 64)
        assert len(answer) == 64 and secret not in answer
        assert first.say(answer[32:]) == b"", "a reflected proof was accepted"
        assert second.say(hello(0), 64) != answer, "a nonce was used twice"
        assert second.say(bytes(32)) == b""

    check_met(meet([secret] * 3, pretend))
    said = [record.getMessage() for record in caplog.records]
    assert any(f"a connection from {HERE} is refused: it does not start as a rank does" in one for one in said), said
    assert any("rank 7, which is not expected" in one for one in said), said
    assert any("rank 0, but does not know the ranks' secret" in one for one in said), said


def test_what_a_rank_has_sent_serves_no_second_time() -> None:
    secret = os.urandom(32)

    def replay(ports: list[int]) -> None:
        first = Stranger(ports[1])
        nonce = first.say(hello(0), 64)[:32]
        proof = Session(secret, 0, 1, NONCE, nonce).proof(CONNECTOR)
        again = Stranger(ports[1])
        assert len(again.say(hello(0), 64)) == 64
        assert again.say(proof) == b""

    check_met(meet([secret] * 2, replay))


def test_a_rank_that_is_there_does_not_come_twice() -> None:
    secret = os.urandom(32)

    def come_twice(ports: list[int]) -> None:
        for rank, answer in ((1, b"welcome"), (1, b"")):
            guest = Stranger(ports[2])
            nonce = guest.say(hello(rank), 64)[:32] or bytes(32)
            proof = Session(secret, rank, 2, NONCE, nonce).proof(CONNECTOR)
            assert guest.say(proof, 7) == answer
            guests.append(guest)

    guests: list[Stranger] = []
    # The guests play rank 1, which does not come itself.
    listeners, ports = zip(*(listen_at(HERE) for _ in range(3)), strict=True)
    places = [Place(peer, HERE, ports[peer]) for peer in (0, 1)]
    raised: list[BaseException] = []

    def run() -> None:
        try:
            MachineRendezvous(2, listeners[2], places, secret, {}).run(1.0)
        except PeersLate as late:
            raised.append(late)

    thread = threading.Thread(target=run)
    thread.start()
    come_twice(list(ports))
    thread.join()
    assert [getattr(one, "ranks", None) for one in raised] == [[0]]
    for listener in listeners:
        listener.close()


def test_who_is_silent_is_dropped_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_rendezvous, "PROOF_SECONDS", 0.2)
    check_met(meet([b"secret"] * 2, lambda ports: Stranger(ports[1]).say(b"")))


def test_many_strangers_keep_no_rank_waiting() -> None:
    kept = []
    check_met(meet([b"secret"] * 2, lambda ports: kept.extend(Stranger(ports[1]) for _ in range(200))))


def test_other_secrets_are_told() -> None:
    """As happens if the files of DEEP_EP_SECRET differ."""
    failed = meet([b"secret", b"another"], seconds=2.0)
    assert isinstance(failed[0], DeepEPError) and "rank 1 does not know the ranks' secret" in str(failed[0]), failed
    assert isinstance(failed[1], PeerGone) and failed[1].rank == 0


@pytest.mark.parametrize("ended", [0, 1], ids=["which_would_connect", "which_is_connected_to"])
def test_a_rank_that_has_ended_is_named(ended: int) -> None:
    listeners, ports = zip(*(listen_at(HERE) for _ in range(2)), strict=True)
    listeners[ended].close()
    own = 1 - ended
    with listeners[own], pytest.raises(PeerGone) as gone:
        MachineRendezvous(own, listeners[own], [Place(ended, HERE, ports[ended])], b"secret", {}).run(5.0)
    assert gone.value.rank == ended


def test_a_rank_of_this_machine_that_ends_meanwhile_is_named() -> None:
    listener, port = listen_at(HERE)
    mine, theirs = socket.socketpair()
    theirs.close()
    with listener, mine, pytest.raises(PeerGone) as gone:
        MachineRendezvous(1, listener, [Place(0, HERE, port)], b"secret", {3: [mine.fileno()]}).run(5.0)
    assert gone.value.rank == 3


def test_a_rank_that_was_met_and_ends_is_named() -> None:
    """Even while other ranks are awaited: their absence alone would only be reported after half an hour."""
    secret = b"secret"
    listeners, ports = zip(*(listen_at(HERE) for _ in range(3)), strict=True)
    raised: list[BaseException] = []

    def run() -> None:
        try:
            MachineRendezvous(2, listeners[2], [Place(peer, HERE, ports[peer]) for peer in (0, 1)], secret, {}).run(5.0)
        except PeerGone as gone:
            raised.append(gone)

    thread = threading.Thread(target=run)
    thread.start()
    MachineRendezvous(0, listeners[0], [Place(2, HERE, ports[2])], secret, {}).run(5.0)[2].socket.close()
    thread.join()
    assert [getattr(one, "rank", None) for one in raised] == [0]
    for listener in listeners:
        listener.close()


def test_an_address_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_rendezvous, "CONNECT_SECONDS", 0.3)
    listener, _ = listen_at(HERE)
    with (
        listener,
        pytest.raises(DeepEPError, match=r"rank 1 cannot be reached at 192\.0\.2\.7, port 9 .*" + ADDRESS),
    ):
        MachineRendezvous(0, listener, [Place(1, "192.0.2.7", 9)], b"secret", {}).run(5.0)


@pytest.mark.parametrize("given", ["192.0.2.7", "nowhere"])
def test_an_address_that_is_not_this_machines(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ADDRESS, given)
    with pytest.raises(ValueError, match=f"{ADDRESS}='{given}': expected an IP address of this machine"):
        own_address()


@pytest.mark.parametrize("source", [None, "127.0.0.1"])
def test_a_machine_without_routes(source: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others would look for its ranks on their own loopback."""
    monkeypatch.delenv(ADDRESS, raising=False)
    monkeypatch.setenv("MASTER_ADDR", "host-1")
    monkeypatch.setattr(machines, "_source_towards", lambda _: source)
    with pytest.raises(ValueError, match=f"only loopback routes, and {ADDRESS} is not set"):
        own_address()
    monkeypatch.setenv(ADDRESS, "127.0.0.1")  # for tests of several machines on one
    assert own_address() == "127.0.0.1"


def test_it_runs_inside_a_loop() -> None:
    """As in a notebook, whose cells run in an event loop."""
    listeners, ports = zip(*(listen_at(HERE) for _ in range(2)), strict=True)
    meetings = [
        MachineRendezvous(rank, listeners[rank], [Place(1 - rank, HERE, ports[1 - rank])], b"secret", {})
        for rank in (0, 1)
    ]

    async def cell() -> dict[int, Met]:
        return meetings[0].run(5.0)

    with ThreadPoolExecutor(1) as threads:
        other = threads.submit(meetings[1].run, 5.0)
        check_met([asyncio.run(cell()), other.result()])
    for listener in listeners:
        listener.close()
