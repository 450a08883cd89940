"""The program of a rank's process. It is started by this file's path, to watch its parent before it imports torch.

A rank must not outlive the process that started it, whatever ends that process and at whatever moment. Three mechanisms
ensure that, none of which needs any action of the parent:

* the kernel kills the rank when its parent ends (PR_SET_PDEATHSIG), even while a call into native code holds the GIL;
* a parent that has ended before the rank could ask for that is no longer its parent, so the rank compares them;
* the connection to the parent closes with the parent, which holds the only other end. A thread waits for that, in case
  the kernel refuses the first.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    # Python has added this file's folder, whose modules must not shadow those of the standard library.
    sys.path = [folder for folder in sys.path if folder != __file__.rpartition("/")[0]]

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


def _end_with(connection: Connection) -> None:
    """Wait until the other end is closed, then end the process group that this rank leads."""
    with suppress(EOFError, OSError):
        while True:
            connection.recv_bytes()
    os.killpg(0, signal.SIGKILL)


def main(parent: int, descriptor: int) -> None:
    """Run a rank.

    Parameters
    ----------
    parent
        The process that started this one.
    descriptor
        File descriptor of the connection to it.
    """
    be_killed_with_parent()
    if os.getppid() != parent:
        sys.exit(1)  # no process is left to tell
    os.set_inheritable(descriptor, False)
    connection = Connection(descriptor)
    try:
        sys.path, job = connection.recv(), connection.recv_bytes()
    except (EOFError, OSError):
        sys.exit(1)  # no process is left to tell
    threading.Thread(target=_end_with, args=(connection,), name="watches the parent", daemon=True).start()

    from deep_ep_py.bench.launch import run_job

    run_job(connection, job)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
