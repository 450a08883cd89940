"""What other users, containers and machines cannot do to a job, and what processes of the same user can: the lines of
docs/security.md that no other test shows.
"""

from __future__ import annotations

import ctypes
import os
import re
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from test_connections import PIECE, RANKS, Meeting, make_connections
from test_handshake import Impostor, meet

from deep_ep_py import DeepEPError
from deep_ep_py.base.environment import ADDRESS, SECRET
from deep_ep_py.base.native import C
from deep_ep_py.transport.bootstrap import start
from deep_ep_py.transport.bootstrap.connections import Connections
from deep_ep_py.transport.bootstrap.machines import machine_name
from places import ROOT, TESTS

pytestmark = [pytest.mark.once, pytest.mark.timeout(60)]

HERE = "127.0.0.1"
HELLO = struct.pack("=i32s", 1, bytes(range(32)))
OWNER, OTHER = 12345, 12346  # users
NEW_NETWORK = 0x40000000  # CLONE_NEWNET of unshare(2)
SET_DUMPABLE = 4  # PR_SET_DUMPABLE of prctl(2)
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")


def become(user: int) -> None:
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)
    ctypes.CDLL(None).prctl(SET_DUMPABLE, 1, 0, 0, 0)  # as for a process that has had this user from its start


@contextmanager
def forked(act: Callable[[int], Any], user: int | None = None) -> Iterator[tuple[int, socket.socket]]:
    """Run `act` with one end of a connection in a child, which may first become another user; yield its pid and the
    other end."""
    ours, theirs = socket.socketpair()
    ours.settimeout(20)
    pid = os.fork()
    if pid == 0:
        try:
            ours.close()
            if user is not None:
                become(user)
            act(theirs.fileno())
        except BaseException as error:  # noqa: B036 - a fork must not continue as its parent
            os.write(theirs.fileno(), type(error).__name__.encode())
        os._exit(0)
    theirs.close()
    try:
        yield pid, ours
    finally:
        ours.close()
        os.waitpid(pid, 0)


def outcome(act: Callable[[], str], user: int | None = None) -> str:
    """Return what `act` returns in a child, or the name of the exception that it raises."""
    with forked(lambda end: os.write(end, act().encode()), user) as (_, child):
        return child.recv(1024).decode()


def answer_to_a_hello(name: str) -> str:
    try:
        return str(len(Impostor(name).say(HELLO)))
    except (BrokenPipeError, ConnectionResetError):  # it was dropped before or after it had spoken
        return "0"


@needs_root
def test_another_user_gets_no_answer() -> None:
    """A process of the same user gets a nonce and a proof, which do not help it."""
    answers = []

    def connect(names: list[str]) -> None:
        answers.extend(outcome(lambda: answer_to_a_hello(names[0]), user) for user in (None, OTHER))

    secret = os.urandom(32)
    assert meet([secret, secret], connect) == [[1, 1], [0, 0]]
    assert answers == ["64", "0"]


def test_another_network_namespace_reaches_no_rank() -> None:
    """As from a container with a network of its own, whose processes count as being on another machine."""

    def connect_from_another() -> str:
        if ctypes.CDLL(None).unshare(NEW_NETWORK) != 0:
            return "not allowed"
        assert machine_name() != here
        return answer_to_a_hello(names[0])

    here, names, answers = machine_name(), list[str](), list[str]()

    def connect(listening: list[str]) -> None:
        names.extend(listening)
        answers.extend((outcome(lambda: answer_to_a_hello(names[0])), outcome(connect_from_another)))

    secret = os.urandom(32)
    assert meet([secret, secret], connect) == [[1, 1], [0, 0]]
    if answers[1] == "not allowed":
        pytest.skip("needs root to make a network namespace")
    assert answers == ["64", "ConnectionRefusedError"]


def own_heap(end: int) -> None:
    """Make a heap, tell its descriptor, and report its first byte once another process has acted."""
    heap = C.Heap.make_shared(PIECE)
    os.write(end, str(heap.descriptor).encode())
    if os.read(end, 1):
        os.write(end, os.pread(heap.descriptor, 1, 0))


def store_to(path: str) -> str:
    descriptor = os.open(path, os.O_RDWR)
    return str(os.pwrite(descriptor, b"x", 0))


def try_to_store(user: int | None, owner: int | None) -> tuple[str, bytes]:
    """Return what a process of `user` achieves with the descriptor of an `owner`'s heap, and the heap's first byte."""
    with forked(own_heap, owner) as (pid, child):
        path = f"/proc/{pid}/fd/{int(child.recv(20))}"
        done = outcome(lambda: store_to(path), user)
        child.send(b"?")
        return done, child.recv(1)


@needs_root
def test_another_user_cannot_open_a_heaps_descriptor() -> None:
    assert try_to_store(OTHER, OWNER) == ("PermissionError", b"\0")


def test_the_same_user_can_open_a_heaps_descriptor() -> None:
    """Nothing protects a rank from its own user."""
    user = OWNER if os.geteuid() == 0 else None
    assert try_to_store(user, user) == ("1", b"x")


def heap_descriptors() -> list[str]:
    found = []
    for one in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the listing's own descriptor is closed by now
            found.append(os.readlink(f"/proc/self/fd/{one}"))
    return [name for name in found if "deep_ep_heap" in name]


def test_no_descriptor_of_a_heap_stays_open() -> None:
    ranks, before = make_connections(), heap_descriptors()
    heaps = [C.Heap.make_shared(PIECE) for _ in ranks]
    assert len(heap_descriptors()) == len(before) + RANKS

    def exchange(rank: int) -> list[Any]:
        return start.exchange_heaps(
            ranks[rank], heaps[rank], lambda descriptor, size, _: C.Heap.map(descriptor, size), lambda: None
        )

    with ThreadPoolExecutor(RANKS) as threads:
        assert all(len(mapped) == RANKS for mapped in threads.map(exchange, range(RANKS)))
    assert heap_descriptors() == before
    for one in ranks:
        one.close()


class Apart:
    """Ranks in threads, each as if it had what `of` gives it: functions of `module`, by name, called in its thread."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch, self._local = patch, threading.local()

    def give(self, module: Any, name: str, values: list[Any]) -> None:
        self._patch.setattr(module, name, lambda: values[self._local.rank])

    def connect(self) -> list[Connections | Exception]:
        values, barrier = dict[tuple[int, int], Any](), threading.Barrier(RANKS)

        def run(rank: int) -> Any:
            self._local.rank = rank
            try:
                return start.connect(Meeting(rank, values, barrier))
            except Exception as error:
                return error

        with ThreadPoolExecutor(RANKS) as threads:
            return list(threads.map(run, range(RANKS)))


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> Apart:
    monkeypatch.setenv(ADDRESS, HERE)
    monkeypatch.delenv(SECRET, raising=False)
    made = Apart(monkeypatch)
    made.give(start, "machine_name", ["a", "b", "c"])
    return made


def check_and_close(met: list[Connections | Exception]) -> None:
    assert all(isinstance(one, Connections) for one in met), met
    for one in met:
        one.close()  # type: ignore[union-attr]


def test_nothing_listens_once_all_have_met(apart: Apart, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither at a name in the abstract namespace nor at a port; and that is a port of one address, not of all."""
    names, ports = [], []

    def listen(make: Callable[..., Any], kept: list[Any], *arguments: Any) -> Any:
        made = make(*arguments)
        assert kept is names or made[0].getsockname() == (HERE, made[1])
        kept.append(made[1])
        return made

    own_listen, own_listen_at = start.listen, start.listen_at
    monkeypatch.setattr(start, "listen", lambda: listen(own_listen, names))
    monkeypatch.setattr(start, "listen_at", lambda address: listen(own_listen_at, ports, address))
    met = apart.connect()
    assert len(names) == len(ports) == RANKS
    for name in names:
        with pytest.raises(ConnectionRefusedError):
            Impostor(name)
    for port in ports:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((HERE, port), 10)
    check_and_close(met)


def test_the_secret_file_is_part_of_the_proof(apart: Apart, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has read all that the process group carried, but not the file, is refused."""
    file = tmp_path / "secret"
    file.write_bytes(b"one")
    monkeypatch.setenv(SECRET, str(file))
    check_and_close(apart.connect())
    apart.give(start, "_kept_secret", [b"one", b"one", b""])
    failed = apart.connect()
    assert all(isinstance(one, DeepEPError) for one in failed), failed
    assert any("rank 2 does not know the ranks' secret" in str(one) for one in failed), failed


@pytest.mark.parametrize(("content", "expected"), [(None, "a readable file"), (b"", "a file that is not empty")])
def test_a_secret_file_without_content_is_refused(
    apart: Apart, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None, expected: str
) -> None:
    """It must not count as if the variable were not set."""
    file = tmp_path / "secret"
    if content is not None:
        file.write_bytes(content)
    monkeypatch.setenv(SECRET, str(file))
    for one in apart.connect():
        assert isinstance(one, ValueError) and f"{SECRET}='{file}': expected {expected}" in str(one), one


def test_ranks_of_a_machine_have_one_user(apart: Apart) -> None:
    """Ranks on other machines raise too, since they would wait; ranks on different machines may have different
    users."""
    apart.give(start, "machine_name", ["a", "b", "b"])
    apart.give(start, "user_number", [1000, 1000, 1001])
    found = "expected the same on all ranks of a machine, it is 1000 on rank 1; 1001 on rank 2"
    texts = [str(one) for one in apart.connect() if isinstance(one, ValueError)]
    assert texts == [f"user={user} on rank {rank}: {found}" for user, rank in ((1000, 1), (1000, 1), (1001, 2))]
    apart.give(start, "user_number", [1001, 1000, 1000])
    check_and_close(apart.connect())


def test_the_page_names_tests_that_exist() -> None:
    page = (ROOT / "docs" / "security.md").read_text()
    named = re.findall(r"`(?:tests/)?([\w/]+\.py)::(\w+)`", page)
    assert len(named) > 20
    for file, test in named:
        assert f"def {test}(" in (TESTS / file).read_text(), f"{file}::{test}"
