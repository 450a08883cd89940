"""A process that has imported torch, and forks itself for each Python program that `forks.run_python` asks for.

A program finds its environment, arguments, folder and output as in a process of its own. This process ends with the one
that started it, and ends the programs.
"""

from __future__ import annotations

import ctypes
import gc
import os
import pickle
import runpy
import signal
import socket
import sys
import types
from contextlib import suppress
from pathlib import Path

PR_SET_PDEATHSIG = 1
MAX_REQUEST = 1 << 20


def _fork() -> int:
    """Fork a process that is killed when this one ends."""
    this = os.getpid()
    child = os.fork()
    if child == 0:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
        if os.getppid() != this:
            os._exit(1)
    return child


def _be_program(arguments: list[str], environment: dict[str, str], folder: str) -> None:
    """Become what Python started with these arguments is, and run the program."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.orig_argv = [sys.executable, *arguments]
    start, *rest = arguments
    sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    if start == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.path.insert(0, "")
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(rest[0], main.__dict__)
    elif start == "-m":
        sys.argv = rest
        sys.path.insert(0, folder)
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path.insert(0, str(Path(start).resolve().parent))
        runpy.run_path(start, run_name="__main__")


def _serve(requests: socket.socket) -> None:
    """Fork a program for each request, and a process beside it that reports its pid and its exit code."""
    while True:
        request, descriptors, _, _ = socket.recv_fds(requests, MAX_REQUEST, 3)
        if not request:  # the other end is closed
            return
        report, out, err = descriptors
        if _fork() == 0:
            requests.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            program = _fork()
            if program == 0:
                os.setsid()
                os.dup2(out, 1), os.dup2(err, 2)
                for descriptor in descriptors:
                    os.close(descriptor)
                _be_program(*pickle.loads(request))
                return
            os.write(report, f"{program}\n".encode())
            code = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
            with suppress(BrokenPipeError):  # it was ended at its timeout
                os.write(report, f"{code}\n".encode())
            os._exit(0)
        for descriptor in descriptors:
            os.close(descriptor)


def main() -> None:
    import numpy  # noqa: F401 - for the programs
    import pytest  # noqa: F401 - for the programs
    import torch.distributed  # noqa: F401 - for the programs

    del sys.path[0]  # this file's folder, which is not in every program's
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no process waits for those that report
    with socket.socket(fileno=int(sys.argv[1])) as requests:
        _serve(requests)


if __name__ == "__main__":
    main()
