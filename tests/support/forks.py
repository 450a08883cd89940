"""Runs Python programs in forks of a process that has imported torch: most programs of tests run for less time than
that import takes. `fork_server.py` is the program of that process."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from builds import SANITIZED
from fork_server import MAX_REQUEST
from places import SUPPORT

READ_AT_START = (
    *("LD_", "MALLOC_", "GLIBC_", "OMP_", "MKL_", "KMP_", "OPENBLAS_"),
    *("PYTHON", "TORCH", "PYTORCH_", "CUDA_"),
)
"""How the names of variables begin that only a process's start, or the import of torch, takes notice of."""
MAX_FORKING = 3
"""Each has 300 MB of memory that it shares only with its forks."""


class _Forking:
    """A process to fork, which ends when the socket closes, with this process at the latest."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.programs = 0
        self.requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.requests.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MAX_REQUEST)
        with theirs:
            command = [sys.executable, str(SUPPORT / "fork_server.py"), str(theirs.fileno())]
            self._process = subprocess.Popen(
                command, env=environment, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
            )

    def runs(self) -> bool:
        return self._process.poll() is None

    def end(self) -> None:
        self.requests.close()
        self._process.wait()


_forking: dict[tuple[tuple[str, str], ...], _Forking] = {}
"""Processes to fork by the variables that they were started with, the latest last."""
_lock = threading.Lock()


@contextmanager
def _process_for(environment: Mapping[str, str]) -> Iterator[_Forking]:
    """Yield a process whose forks need not differ in what only a start takes notice of."""
    started_with = {
        name: value for name, value in environment.items() if name.startswith(READ_AT_START) and name != "PYTHONPATH"
    }
    key = tuple(sorted(started_with.items()))
    with _lock:
        forking = _forking.pop(key, None)
        if forking is None or not forking.runs():
            idle = [one for one, process in _forking.items() if process.programs == 0]
            for one in idle[: max(0, len(_forking) + 1 - MAX_FORKING)]:
                _forking.pop(one).end()
            others = {name: value for name, value in os.environ.items() if not name.startswith(READ_AT_START)}
            forking = _Forking(others | started_with)
        _forking[key] = forking
        forking.programs += 1
    try:
        yield forking
    finally:
        with _lock:
            forking.programs -= 1


def run_python(
    arguments: Sequence[str], env: Mapping[str, str], *, cwd: Path | None = None, timeout: float = 240
) -> subprocess.CompletedProcess[str]:
    """Do what `subprocess.run` does with Python's arguments: a script, `-m` a module or `-c` code, and their own.

    A test of how a program starts, or of what it imports, starts a process of its own instead; so do sanitized builds,
    whose runtimes want that.
    """
    if SANITIZED:
        command = [sys.executable, *arguments]
        return subprocess.run(command, env=env, cwd=cwd, timeout=timeout, capture_output=True, text=True)
    ours, theirs = socket.socketpair()
    with _process_for(env) as forking, ours, theirs, TemporaryFile("w+") as out, TemporaryFile("w+") as err:
        request = pickle.dumps((list(arguments), dict(env), str(cwd or Path.cwd())))
        socket.send_fds(forking.requests, [request], [theirs.fileno(), out.fileno(), err.fileno()])
        theirs.close()
        with ours.makefile() as reported:
            pid = int(reported.readline())
            ours.settimeout(timeout)
            try:
                code = int(reported.readline())
            except BaseException as error:
                os.killpg(pid, signal.SIGKILL)
                if isinstance(error, TimeoutError):
                    raise subprocess.TimeoutExpired(arguments, timeout, *_read(out, err)) from None
                raise
        return subprocess.CompletedProcess(arguments, code, *_read(out, err))


def _read(*files: Any) -> list[str]:
    for file in files:
        file.seek(0)
    return [file.read() for file in files]
