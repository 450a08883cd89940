"""How the processes of a Buffer tell each other from strangers, and whose memory they map."""

from __future__ import annotations

import fcntl
import os
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from test_connections import PIECE, make_connections

from deep_ep_py import DeepEPError
from deep_ep_py.base.native import C
from deep_ep_py.errors import CudaError
from deep_ep_py.transport.bootstrap import handshake
from deep_ep_py.transport.bootstrap.connections import Connections
from deep_ep_py.transport.bootstrap.start import exchange_heaps

pytestmark = pytest.mark.once


@pytest.fixture
def ranks() -> Iterator[list[Connections]]:
    made = make_connections()
    yield made
    for one in made:
        one.close()


class Impostor:
    """A stranger inside this process that knows the names but not the secret."""

    def __init__(self, name: str) -> None:
        self.socket = handshake.make_socket()
        self.socket.settimeout(10)
        self.socket.connect(name)

    def say(self, message: bytes) -> bytes:
        self.socket.send(message)
        return self.socket.recv(1024)


def meet(secrets: list[bytes], meanwhile: Callable[[list[str]], Any]) -> list[Any]:
    """Let two ranks meet, each with a secret, while a stranger acts. Returns what each met or raised."""
    listeners, names = zip(*(handshake.listen() for _ in secrets), strict=True)
    outcomes: list[Any] = [None] * len(secrets)

    def run(rank: int) -> None:
        maps: tuple[dict[int, Any], ...] = ({}, {}, {})
        meeting = handshake.Meeting(rank, listeners[rank], dict(enumerate(names)), secrets[rank], *maps)
        try:
            meeting.run(5.0)
            outcomes[rank] = sorted(maps[0]) + sorted(maps[1])
        except Exception as error:
            outcomes[rank] = error
        finally:
            listeners[rank].close()
            for connection in (*maps[0].values(), *maps[1].values()):
                connection.close()
            for process in maps[2].values():
                os.close(process)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(secrets))]
    threads[0].start()
    meanwhile(list(names))
    threads[1].start()
    for thread in threads:
        thread.join()
    return outcomes


@pytest.mark.timeout(60)
def test_both_ends_prove_themselves() -> None:
    """A stranger inevitably gets a proof from the listener, but cannot derive a proof of its own from it."""
    secret, nonce = os.urandom(32), os.urandom(32)

    def pretend(names: list[str]) -> None:
        hello = struct.pack("=i32s", 1, nonce)
        first = Impostor(names[0])
        answer = first.say(hello)
        assert len(answer) == 64 and secret not in answer
        assert first.say(answer[32:]) == b"", "a reflected proof was accepted"
        second = Impostor(names[0])
        assert second.say(hello) != answer, "a nonce was used twice"
        assert second.say(bytes(32)) == b""
        for wrong in (b"", hello[:-1], struct.pack("=i32s", 0, nonce), struct.pack("=i32s", 7, nonce)):
            assert Impostor(names[0]).say(wrong or b"x") == b""

    assert meet([secret, secret], pretend) == [[1, 1], [0, 0]]
    failed = meet([secret, os.urandom(32)], lambda _: None)
    assert all(isinstance(one, handshake.PeerGone) for one in failed), failed


@pytest.mark.timeout(60)
def test_who_is_silent_is_dropped_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "PROOF_SECONDS", 0.2)
    secret = os.urandom(32)

    def wait_to_be_dropped(names: list[str]) -> None:
        assert Impostor(names[0]).socket.recv(1) == b""

    assert meet([secret, secret], wait_to_be_dropped) == [[1, 1], [0, 0]]


@pytest.mark.timeout(60)
def test_ranks_that_do_not_come_are_named() -> None:
    listener, name = handshake.listen()
    other, silent = handshake.listen()
    with listener, other, pytest.raises(handshake.PeersLate) as late:
        handshake.Meeting(0, listener, {0: name, 1: silent}, b"secret", {}, {}, {}).run(0.3)
    assert late.value.ranks == [1]


def test_a_drivers_refusal_names_the_ranks(ranks: list[Connections]) -> None:
    heap = C.Heap.make_shared(PIECE)
    for one in ranks[1:]:
        one._send(b"descriptor", [heap.descriptor])

    def refuse(*_: int) -> None:
        raise CudaError("mapping a heap: CUDA_ERROR_OUT_OF_MEMORY")

    with pytest.raises(CudaError, match=r"rank 0: memory of rank \d cannot be mapped: mapping a heap: CUDA_ERROR"):
        exchange_heaps(ranks[0], heap, refuse, lambda: None)


@pytest.mark.parametrize("what", ["unsealed", "shrunk", "of another size"])
def test_memory_that_could_shrink_is_refused(ranks: list[Connections], what: str) -> None:
    """Any access past its end would be a SIGBUS."""
    heap = C.Heap.make_shared(PIECE)
    with pytest.raises(OSError, match="Operation not permitted"):
        os.ftruncate(heap.descriptor, 0)
    bad = heap.descriptor
    if what != "of another size":
        bad = os.memfd_create("heap", os.MFD_ALLOW_SEALING)
        os.ftruncate(bad, PIECE if what == "unsealed" else PIECE // 2)
    if what == "shrunk":
        fcntl.fcntl(bad, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    size = 2 * PIECE if what == "of another size" else PIECE
    for one in ranks[1:]:
        one._send(b"descriptor", [bad])
    expected = "sealed" if what == "unsealed" else f"expected memory of {size} bytes"
    with pytest.raises(DeepEPError, match=rf"rank 0: memory of rank \d cannot be mapped: .*{expected}"):
        exchange_heaps(
            ranks[0], C.Heap.make_shared(size), lambda descriptor, size, _: C.Heap.map(descriptor, size), lambda: None
        )
    if what != "of another size":
        os.close(bad)
