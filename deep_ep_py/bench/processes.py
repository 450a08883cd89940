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

_PROGRAM = Path(__file__).with_name("rank_process.py")
# How long to listen to other ranks after one has failed: the first to report may only have missed the one at fault.
_LISTEN_SECONDS = 0.5


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


class _Rank:
    """A rank's process, and the connection to it."""

    def __init__(self, rank: int, descriptors: list[int], environment: dict[str, str]) -> None:
        self.rank = rank
        self.failure: str | None = None
        self.raised = self._done = False
        self.result: Any = None
        # Both ends are closed on exec unless passed on: no rank holds the parent's end of any connection.
        self.connection, theirs = Pipe()
        with theirs:
            command = [sys.executable, str(_PROGRAM), str(os.getpid()), str(theirs.fileno())]
            self._process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno(), *descriptors],
                # Ctrl-C is for the parent, which ends the ranks. The new process group covers all that a rank starts.
                start_new_session=True,
            )

    def send(self, job: bytes) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # it has ended, which `receive` will find
            self.connection.send(sys.path)
            self.connection.send_bytes(job)

    def receive(self) -> Any:
        """Return the event that the rank emits, or None if it sent or did something else."""
        try:
            kind, value = self.connection.recv()
        except (EOFError, ConnectionResetError):
            self.connection.close()
            if self.failure is None:
                self.failure = self._how_it_ended()
            return None
        if kind == "event":
            return value
        if kind == "raised":
            self.failure, self.raised = f"raised:\n{value}", True
        else:
            self.result, self._done = value, True
        return None

    def _how_it_ended(self) -> str | None:
        """Wait for the process's end, and return what is wrong with it."""
        # Not reaped yet: its pid must stay its own until its group has been ended.
        ended = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        assert ended is not None
        when = "after" if self._done else "before"
        if ended.si_code != os.CLD_EXITED:
            return f"was ended by {signal.Signals(ended.si_status).name} {when} it was done"
        if self._done and ended.si_status == 0:
            return None
        return f"ended with exit code {ended.si_status} {when} it was done"

    def end(self) -> None:
        """End the process, if it is still running, and everything that it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self.connection.close()


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
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # torch reads it while it is imported
    # Ranks meet at an anonymous file, which vanishes with the last process that has it open.
    meeting = os.memfd_create("rendezvous")
    started: list[_Rank] = []
    try:
        for rank in range(ranks):
            started.append(_Rank(rank, [meeting], environment))
        for one in started:
            one.send(pickle.dumps((name, one.rank, ranks, f"file:///proc/self/fd/{meeting}", args)))
        failed = _listen(started, on_event)
        if failed:
            raise _failure(failed, ranks)
        return started[0].result
    finally:
        for one in started:
            one.end()
        os.close(meeting)


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


def _listen(ranks: list[_Rank], on_event: Callable[[Any], None]) -> list[_Rank]:
    """Wait until all ranks have ended, or some time after the first failure; return those that failed, in order."""
    failed: list[_Rank] = []
    until: float | None = None
    open_ = {one.connection: one for one in ranks}
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
