"""The program that ranks are forked from, which imports the package and torch once for all of them. It is started by
this file's path, to watch its parent before it imports torch.

Ranks must not outlive the process that started them, whatever ends that process and at whatever moment. Three
mechanisms ensure that, none of which needs any action of that process:

* the kernel kills this program when its parent ends, and the ranks when this program ends (PR_SET_PDEATHSIG), even
  while a call into native code holds the GIL;
* a parent that has ended before its child could ask for that is no longer its parent, so the child compares them;
* the connection to the parent closes with the parent, which holds the only other end. A thread waits for that, in case
  the kernel refuses the first, and ends the process group, which all ranks are in.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    # Python has added this file's folder, whose modules must not shadow those of the standard library.
    sys.path = [folder for folder in sys.path if folder != __file__.rpartition("/")[0]]

import gc
import os
import signal
import threading
from contextlib import suppress
from multiprocessing.connection import Connection

_PR_SET_PDEATHSIG = 1


def be_killed_with_parent() -> bool:
    """Make the kernel kill this process when its parent ends, more precisely the parent's thread that started it.

    Returns
    -------
    bool
        Whether the kernel agreed.
    """
    try:
        import ctypes

        return ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) == 0
    except (ImportError, OSError, AttributeError):  # a Python without ctypes, a C library without prctl
        return False


def _end_with(parent: int) -> None:
    """End with the parent; at once if it has ended."""
    be_killed_with_parent()
    if os.getppid() != parent:
        sys.exit(1)  # no process is left to tell


def _kill_group_with(connection: Connection) -> None:
    """Wait until the other end is closed, then end the process group."""
    with suppress(EOFError, OSError):
        while True:
            connection.recv_bytes()
    os.killpg(0, signal.SIGKILL)


def main(parent: int, descriptor: int, *descriptors: int) -> None:
    """Fork a rank for each of its connections, and report the exit codes of ranks as they end.

    Parameters
    ----------
    parent
        The process that started this one.
    descriptor, descriptors
        File descriptors of the connection to it, and of each rank's.
    """
    _end_with(parent)
    for inherited in (descriptor, *descriptors):
        os.set_inheritable(inherited, False)
    connection, of_ranks = Connection(descriptor), [Connection(one) for one in descriptors]
    try:
        sys.path, job = connection.recv()
    except (EOFError, OSError):
        sys.exit(1)  # no process is left to tell

    from deep_ep_py.tools.bench.rank_job import run_job

    gc.freeze()
    # A process that ignores it passes that on, and no child can be waited for where it is ignored.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    this, ranks = os.getpid(), {}
    for rank, own in enumerate(of_ranks):
        child = os.fork()
        if child == 0:
            _end_with(this)
            for other in (connection, *of_ranks):
                if other is not own:
                    other.close()
            os.dup(own.fileno())  # so that it closes when the process has ended, and not before
            run_job(own, rank, job)
            return
        ranks[child] = rank
    for own in of_ranks:
        own.close()
    threading.Thread(target=_kill_group_with, args=(connection,), name="watches the parent", daemon=True).start()
    while ranks:
        child, status = os.wait()
        if child in ranks:
            connection.send((ranks.pop(child), os.waitstatus_to_exitcode(status)))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
