"""Runs a script on ranks as `torchrun --standalone` does, but forks them from a process that has imported torch.

    python fork_torchrun.py RANKS (SCRIPT | -m MODULE) [ARGUMENTS]

Most workers run for less time than an import of torch takes, which torchrun makes once for each rank and once for
itself. When a rank fails, the others are ended; the exit code is that of the first that failed, or 1.
"""

from __future__ import annotations

import ctypes
import gc
import os
import runpy
import signal
import socket
import sys
import time
from typing import Any

import numpy  # noqa: F401 - for the ranks
import pytest  # noqa: F401 - for the ranks
import torch.distributed as dist

from fork_server import end_with

LAST_SECONDS = 10.0
PR_SET_PDEATHSIG = 1


def be_rank(rank: int, ranks: int, port: int) -> dict[str, Any]:
    """Become what torchrun's processes are, run the script and return its names."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))  # at a timeout only the parent is killed
    os.environ |= {
        **{name: str(rank) for name in ("RANK", "LOCAL_RANK", "ROLE_RANK")},
        **{name: str(ranks) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE")},
        **{"GROUP_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)},
        **{"TORCHELASTIC_RUN_ID": "forked", "TORCHELASTIC_USE_AGENT_STORE": "True"},
    }
    sys.argv = sys.argv[2:]
    if sys.argv[0] == "-m":
        sys.path[0] = os.getcwd()
        del sys.argv[0]
        return runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    return runpy.run_path(sys.argv[0], run_name="__main__")


def wait_for(ranks: dict[int, int]) -> int:
    """Wait for processes, whose ranks are given, and end the others when one fails."""
    failed, deadline = 0, float("inf")
    while ranks:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in ranks:
            rank, code = ranks.pop(pid), os.waitstatus_to_exitcode(status)
            if code and not failed:
                print(f"rank {rank} (pid {pid}) has ended with exit code {code}", file=sys.stderr, flush=True)
                failed, deadline = code if code > 0 else 1, time.monotonic() + LAST_SECONDS
                for other in ranks:
                    os.kill(other, signal.SIGTERM)
        elif time.monotonic() >= deadline:
            for other in ranks:
                os.kill(other, signal.SIGKILL)
        else:
            time.sleep(0.01)
    return failed


def main() -> int:
    ranks, pids = int(sys.argv[1]), {}
    # The store has a thread, so it is made when all ranks have been forked; they connect to its socket before.
    listening = socket.create_server(("localhost", 0))
    port = listening.getsockname()[1]
    gc.freeze()
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            listening.close()
            end_with(be_rank, rank, ranks, port)
        pids[pid] = rank
    descriptor = listening.detach()
    store = dist.TCPStore("localhost", port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor)
    failed = wait_for(pids)
    del store
    return failed


if __name__ == "__main__":
    sys.exit(main())
