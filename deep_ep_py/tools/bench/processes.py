"""Ranks as processes that end with the process that started them, however it ends: `rank_process` describes how."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from deep_ep_py.base.files import memory_file

_PROGRAM = Path(__file__).with_name("rank_process.py")
# How long to listen to other ranks after one has failed: the first to report may only have missed the one at fault.
_LISTEN_SECONDS = 0.5
# How long to wait until a killed rank has ended.
_END_SECONDS = 5.0


class RankFailed(RuntimeError):
    """A rank's process raised, or ended before it was done. All others have been ended.

    Attributes
    ----------
    rank : int
        The rank that failed. Of several, one that ended without raising is preferred, then the first to report.
    """

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message)
        self.rank = rank


def _ending(code: int) -> str:
    """Say how a process ended, given its exit code or the negative of the signal that ended it."""
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


class _Rank:
    """The connection to a rank's process, and what has become of the rank."""

    def __init__(self, rank: int, connection: Connection) -> None:
        self.rank = rank
        self.connection = connection
        self.failure: str | None = None
        self.raised = self.done = False
        self.result: Any = None

    def receive(self) -> Any:
        """Return the event that the rank emits, or None if it sent or did something else."""
        try:
            kind, value = self.connection.recv()
        except (EOFError, OSError):  # at the end of its process, perhaps in the middle of a message
            self.connection.close()
            return None
        if kind == "event":
            return value
        if kind == "raised":
            self.failure, self.raised = f"raised:\n{value}", True
        else:
            self.result, self.done = value, True
        return None


class _Ranks:
    """The process that ranks are forked from, and the connections to it and to each rank."""

    def __init__(self, ranks: int) -> None:
        # Both ends are closed on exec unless passed on: no other process holds the parent's end of any connection.
        self._connection, theirs = Pipe()
        pairs = [Pipe() for _ in range(ranks)]
        self.ranks = [_Rank(rank, ours) for rank, (ours, _) in enumerate(pairs)]
        self._passed = [theirs, *(end for _, end in pairs)]
        self._process: subprocess.Popen[bytes] | None = None
        self._exit_codes: dict[int, int] = {}

    def start(self, job: bytes, descriptors: list[int]) -> None:
        """Start the process, which passes a job and these descriptors on to ranks."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # torch reads it while it is imported
        numbers = [end.fileno() for end in self._passed]
        command = [sys.executable, str(_PROGRAM), str(os.getpid()), *map(str, numbers)]
        self._process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            pass_fds=[*numbers, *descriptors],
            # Ctrl-C is for the parent, which ends the ranks. The new process group covers all that they start.
            start_new_session=True,
        )
        self._close_passed()
        with suppress(BrokenPipeError, ConnectionResetError):  # it has ended, which `how_it_ended` will find
            self._connection.send((sys.path, job))

    def _close_passed(self) -> None:
        for end in self._passed:
            end.close()

    def how_it_ended(self, one: _Rank) -> str | None:
        """Wait for the end of a rank's process, and return what is wrong with it."""
        try:
            while one.rank not in self._exit_codes:
                rank, code = self._connection.recv()
                self._exit_codes[rank] = code
        except (EOFError, ConnectionResetError):
            return f"ended with the process that it was forked from, which {self._own_end()}"
        code, when = self._exit_codes[one.rank], "after" if one.done else "before"
        return None if one.done and code == 0 else f"{_ending(code)} {when} it was done"

    def _own_end(self) -> str:
        """Wait for the end of the process that ranks are forked from, and return how it ended."""
        assert self._process is not None
        # Not reaped yet: its pid must stay its own until its group has been ended.
        ended = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        assert ended is not None
        return _ending(ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status)

    def end(self) -> None:
        """End the processes that are still running, and everything that they have started."""
        self._close_passed()
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        for one in self.ranks:
            # A killed rank's connection is closed when nothing is left of it.
            with suppress(EOFError, OSError):
                while one.connection.poll(_END_SECONDS):
                    one.connection.recv_bytes()
            one.connection.close()
        self._connection.close()


def run_processes(
    ranks: int, function: Callable[..., Any], args: tuple[Any, ...], on_event: Callable[[Any], None]
) -> Any:
    """Run a function on `ranks` ranks, each a process: the part of `launch` without torchrun.

    The calling thread must live until this returns, because the kernel ends the ranks with it.

    Parameters
    ----------
    ranks
        Number of ranks.
    function, args
        The function that every rank runs, and its arguments after a `RankContext`.
    on_event
        Receives what rank 0 emits.

    Returns
    -------
    object
        The result of rank 0.

    Raises
    ------
    RankFailed
        A rank raised, or its process ended early.
    ValueError
        Ranks could not import `function`.
    """
    name = _importable(function)
    meeting = memory_file("rendezvous")
    try:
        job = pickle.dumps((name, ranks, f"file:///proc/self/fd/{meeting}", args))
        started = _Ranks(ranks)
        try:
            started.start(job, [meeting])
            failed = _listen(started, on_event)
        finally:
            started.end()
    finally:
        os.close(meeting)
    if failed:
        raise _failure(failed, ranks)
    return started.ranks[0].result


def _importable(function: Callable[..., Any]) -> tuple[str, str]:
    """Return a function's module and its name there; what `python -m` runs has another name in other processes."""
    module = function.__module__
    if module == "__main__":
        spec = getattr(sys.modules["__main__"], "__spec__", None)
        module = "" if spec is None else spec.name
    if not module or "<" in function.__qualname__:
        raise ValueError(
            f"function={function.__qualname__}: expected a function of a module that every rank can import, "
            "not one that is defined in a script"
        )
    return module, function.__qualname__


def _listen(started: _Ranks, on_event: Callable[[Any], None]) -> list[_Rank]:
    """Wait until all ranks have ended, or some time after the first failure; return those that failed, in order."""
    failed: list[_Rank] = []
    until: float | None = None
    open_ = {one.connection: one for one in started.ranks}
    while open_:
        left = None if until is None else until - time.monotonic()
        if left is not None and left <= 0:
            break
        for connection in wait(list(open_), left):
            assert isinstance(connection, Connection)
            one = open_[connection]
            event = one.receive()
            if event is not None:
                on_event(event)
            if connection.closed:
                del open_[connection]
                one.failure = one.failure or started.how_it_ended(one)
            if one.failure is not None and one not in failed:
                failed.append(one)
                until = until or time.monotonic() + _LISTEN_SECONDS
    return failed


def _failure(failed: list[_Rank], ranks: int) -> RankFailed:
    """Return the failure of the rank most likely at fault: others raise because one has ended without raising."""
    chosen = next((one for one in failed if not one.raised), failed[0])
    others = sorted((one for one in failed if one is not chosen), key=lambda one: one.rank)
    # The last line of a traceback has the exception.
    also = "".join(f"\nrank {one.rank}, then: {str(one.failure).rstrip().splitlines()[-1]}" for one in others)
    return RankFailed(chosen.rank, f"rank {chosen.rank} of {ranks} {chosen.failure}{also}")
