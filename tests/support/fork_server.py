"""A process that has imported torch, and forks itself for each Python program that `forks.run_python` asks for.

A program finds its environment, arguments, folder and output as in a process of its own. This process ends with the one
that started it, and ends the programs.

A program ends as in a process of its own, except that imported modules are not freed: for torch's this takes ten times
as long as the fork. A test of how Python ends sets TEARDOWN.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import pickle
import runpy
import signal
import socket
import sys
import threading
import types
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

TEARDOWN = "DEEP_EP_TEARDOWN"
"""The variable with which a program ends as any other, and frees all modules."""
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


def end_with(program: Callable[..., dict[str, Any]], *arguments: Any) -> NoReturn:
    """Run a program, which returns its names, and end the process, without freeing modules unless that is asked for."""
    if os.environ.get(TEARDOWN):
        program(*arguments)
        sys.exit()
    kept, failure, code = {}, None, 0
    try:
        kept = program(*arguments)
    except SystemExit as end:
        failure, code = end, end.code if isinstance(end.code, int) else int(end.code is not None)
        if code and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
    except BaseException as error:
        failure, code = error, 1
        sys.excepthook(*sys.exc_info())
    threading._shutdown()  # waits for threads that are not daemons
    atexit._run_exitfuncs()
    sys.modules.pop("__main__")
    kept.clear()
    interrupted, failure = isinstance(failure, KeyboardInterrupt), None
    gc.collect()  # what the program has made
    sys.stdout.flush(), sys.stderr.flush()
    if interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code)


def _be_program(arguments: list[str], folder: str) -> dict[str, Any]:
    """Become what Python started with these arguments is, run the program and return its names."""
    os.chdir(folder)
    sys.orig_argv = [sys.executable, *arguments]
    start, *rest = arguments
    sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    if start == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.path.insert(0, "")
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(rest[0], main.__dict__)
        return main.__dict__
    if start == "-m":
        sys.argv = rest
        sys.path.insert(0, folder)
        return runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    sys.argv = arguments
    sys.path.insert(0, str(Path(start).resolve().parent))
    return runpy.run_path(start, run_name="__main__")


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
                arguments, environment, folder = pickle.loads(request)
                os.environ.clear()
                os.environ.update(environment)
                end_with(_be_program, arguments, folder)
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
    import torch._dynamo  # noqa: F401 - for programs that call an op: the first call imports it
    import torch.distributed  # noqa: F401 - for the programs

    del sys.path[0]  # this file's folder, which is not in every program's
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no process waits for those that report
    with socket.socket(fileno=int(sys.argv[1])) as requests:
        _serve(requests)


if __name__ == "__main__":
    main()
