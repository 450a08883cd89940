"""Ranks that the benchmark and the examples start as processes: they end with the process that started them, however it
ends, and if one of them fails, it is named and the others end.

The benchmark is killed at 6 points in time, in `make test-long` at 50.
"""

from __future__ import annotations

import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import rank_jobs
from builds import LONG
from deep_ep_py.tools.bench import processes, rank_process
from deep_ep_py.tools.bench.launch import launch
from deep_ep_py.tools.bench.processes import RankFailed
from launches import free_port
from worker_runs import lines_of

pytestmark = [pytest.mark.timed, pytest.mark.once]

KILLS = 50 if LONG else 6
SECONDS = 2.0
MARKER = "DEEP_EP_TEST_MARKER"
FORKED_FROM = r"rank \d of 2 ended with the process that it was forked from, which was ended by SIGKILL"


@pytest.mark.long
@pytest.mark.thorough
def test_ranks_end_with_their_parent_killed_at_random_moments(tmp_path: Path) -> None:
    trials = lines_of("killed_parents.py", f"--kills={KILLS}", f"--folder={tmp_path}", seconds=60 + 30 * KILLS)
    assert len(trials) == KILLS
    for trial in trials:
        assert trial["gone"] is not None and trial["gone"] < SECONDS, trial
        assert not trial["files"], trial
    assert any(trial["ranks"] for trial in trials), trials


def is_alive(pid: int) -> bool:
    """Return whether a process is running; a zombie is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def ends(alive: Callable[[], bool]) -> bool:
    until = time.monotonic() + SECONDS
    while alive():
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """Return a list that receives the process that `launch` starts, from which it forks the ranks."""
    found: list[subprocess.Popen[bytes]] = []

    class Popen(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            found.append(self)

    monkeypatch.setattr(processes.subprocess, "Popen", Popen)
    return found


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raises", "rank 1 of 2 raised:\nTraceback"),
        ("is killed", "rank 1 of 2 was ended by SIGKILL before it was done"),
    ],
)
def test_a_rank_that_fails_is_named_and_ends_the_others(
    how: str, message: str, started: list[subprocess.Popen[bytes]]
) -> None:
    """Regardless of what the others, which miss it, have raised meanwhile. Processes that it has started end too."""
    with pytest.raises(RankFailed, match=re.escape(message)) as info:
        launch(rank_jobs.one_fails, 2, (how,), lambda event: None)
    assert info.value.rank == 1
    assert len(started) == 1 and started[0].returncode is not None
    if how == "raises":
        child = re.search(r"out of luck, child (\d+)", str(info.value))
        assert child is not None and ends(lambda: is_alive(int(child[1])))


@pytest.mark.thorough
def test_a_caller_that_ignores_the_ends_of_its_children() -> None:
    """As a program may that never waits for any: the processes that it starts ignore them too, at first."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        with pytest.raises(RankFailed, match="rank 1 of 2 was ended by SIGKILL before it was done"):
            launch(rank_jobs.one_fails, 2, ("is killed",), lambda event: None)
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_the_rank_at_fault_is_told_from_those_that_miss_it() -> None:
    """It has ended without an exception, or was the first to raise."""
    late = SimpleNamespace(rank=2, raised=True, failure="raised:\nTraceback:\n  a line\nValueError: bad\n")
    early = SimpleNamespace(rank=0, raised=True, failure="raised:\nTraceback:\n  a line\nRuntimeError: lost it\n")
    killed = SimpleNamespace(rank=1, raised=False, failure="was ended by SIGSEGV before it was done")
    failed: list[Any] = [early, late, killed]
    told = "rank 1 of 3 was ended by SIGSEGV before it was done"
    told += "\nrank 0, then: RuntimeError: lost it\nrank 2, then: ValueError: bad"
    assert str(processes._failure(failed, 3)) == told
    assert processes._failure(failed[:2], 3).rank == 0


def test_an_interrupt_ends_the_ranks(started: list[subprocess.Popen[bytes]]) -> None:
    """Ctrl-C while they are starting."""
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it
    began = time.monotonic()
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            launch(rank_jobs.wait_forever, 2, (), lambda event: None)
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - began < 0.5 + SECONDS
    assert len(started) == 1 and started[0].returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    "function", [rank_jobs.wait_forever, pytest.param(rank_jobs.emit_much, marks=pytest.mark.thorough)]
)
def test_an_exception_of_the_caller_ends_the_ranks(
    started: list[subprocess.Popen[bytes]], function: Callable[..., None]
) -> None:
    def on_event(event: dict[str, Any]) -> None:
        raise RuntimeError(f"not today, {event['pid']}")

    with pytest.raises(RuntimeError, match=r"not today, \d+") as info:
        launch(function, 2, (), on_event)
    assert [process.returncode for process in started] == [-signal.SIGKILL]
    assert ends(lambda: is_alive(int(str(info.value).split()[-1])))


@pytest.mark.thorough
def test_ranks_end_with_the_process_that_they_are_forked_from(started: list[subprocess.Popen[bytes]]) -> None:
    """The kernel ends them, as when memory runs out and that process is chosen."""
    ranks: list[int] = []

    def on_event(event: dict[str, Any]) -> None:
        ranks.append(event["pid"])
        started[0].kill()

    with pytest.raises(RankFailed, match=FORKED_FROM):
        launch(rank_jobs.wait_forever, 2, (), on_event)
    assert ends(lambda: is_alive(ranks[0]))


def test_what_ranks_cannot_import_is_refused() -> None:
    with pytest.raises(ValueError, match="<lambda>: expected a function of a module that every rank can import"):
        launch(lambda context: None, 2, (), lambda event: None)


def forking_process(parent: int, theirs: Connection) -> subprocess.Popen[bytes]:
    """Start the process that ranks are forked from as `launch` does, with the pid of its parent."""
    program = str(Path(processes.__file__).with_name("rank_process.py"))
    command = [sys.executable, program, str(parent), str(theirs.fileno())]
    return subprocess.Popen(command, pass_fds=[theirs.fileno()], start_new_session=True)


def test_ranks_end_with_their_parent_while_the_connection_is_open() -> None:
    """As when a native call holds the GIL, so that no thread can check the connection."""
    ours, theirs = Pipe()
    reader, writer = os.pipe()
    parent = os.fork()
    if parent == 0:
        os.write(writer, f"{forking_process(os.getpid(), theirs).pid}".encode())
        time.sleep(100)
        os._exit(0)
    forking = int(os.read(reader, 20))
    os.close(reader), os.close(writer)
    try:
        ours.send((sys.path, b""))
        time.sleep(0.3)
        assert is_alive(forking)
    finally:
        os.kill(parent, signal.SIGKILL)
        os.waitpid(parent, 0)
    assert ends(lambda: is_alive(forking))
    ours.close(), theirs.close()


@pytest.mark.parametrize("ends_first", ["connection", "rank"])
def test_ranks_end_where_the_kernel_does_not_end_them(monkeypatch: pytest.MonkeyPatch, ends_first: str) -> None:
    """A thread waits for the connection to close; an ended rank is reported before that."""
    ours, theirs = Pipe()
    rank, of_rank = Pipe()
    forking = os.fork()
    if forking == 0:
        os.setsid()
        ours.close(), rank.close()
        monkeypatch.setattr(rank_process, "be_killed_with_parent", lambda: False)
        code = 1
        try:
            rank_process.main(os.getppid(), theirs.fileno(), of_rank.fileno())
            code = 0
        finally:
            os._exit(code)
    theirs.close(), of_rank.close()
    ours.send((sys.path, pickle.dumps((("rank_jobs", "wait_forever"), 1, f"tcp://localhost:{free_port()}", ()))))
    kind, event = rank.recv()
    assert kind == "event" and is_alive(event["pid"])
    if ends_first == "rank":
        os.kill(event["pid"], signal.SIGTERM)
        assert ours.recv() == (0, -signal.SIGTERM)
        assert os.waitpid(forking, 0)[1] == 0, "no rank is left"
    ours.close()
    assert ends(lambda: is_alive(event["pid"]))
    if ends_first == "connection":
        assert os.waitpid(forking, 0)[1] == signal.SIGKILL
    rank.close()


def test_ranks_whose_parent_has_ended_before_it_looked_end_at_once() -> None:
    ours, theirs = Pipe()
    process = forking_process(1 << 30, theirs)
    assert process.wait(SECONDS) == 1
    ours.close(), theirs.close()


def test_a_rank_of_torchruns_ends_with_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or with any other launcher that started it this way."""
    environment = {"TORCHELASTIC_RUN_ID": "test", "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}
    for name, value in {**environment, "MASTER_PORT": str(free_port())}.items():
        monkeypatch.setenv(name, value)
    reader, writer = os.pipe()
    parent = os.fork()
    if parent == 0:
        if os.fork() == 0:
            launch(rank_jobs.wait_forever, 1, (), lambda event: os.write(writer, str(event["pid"]).encode()))
        time.sleep(100)
        os._exit(0)
    os.close(writer)
    rank = int(os.read(reader, 20))
    os.close(reader)
    assert is_alive(rank)
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    try:
        assert ends(lambda: is_alive(rank))
    finally:
        with suppress(ProcessLookupError):
            os.kill(rank, signal.SIGKILL)
