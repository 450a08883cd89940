"""The functions that tests run in rank processes, in a module that these can import."""

from __future__ import annotations

import os
import signal
import subprocess
import time

import torch.distributed as dist

from deep_ep_py.tools.bench.rank_job import RankContext


def wait_forever(context: RankContext) -> None:
    """Wait until the process is killed."""
    context.emit({"pid": os.getpid()})
    time.sleep(1000)


def emit_much(context: RankContext) -> None:
    """Report more than a connection holds, so that the process is killed in the middle of it."""
    context.emit({"pid": os.getpid()})
    context.emit({"pid": bytes(64 << 20)})


def one_fails(context: RankContext, how: str) -> None:
    """Fail on the last rank, which has started a child process; the others wait for it."""
    if context.rank == context.ranks - 1:
        child = subprocess.Popen(["sleep", "1000"], stdin=subprocess.DEVNULL)
        if how == "raises":
            raise RuntimeError(f"out of luck, child {child.pid}")
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier(group=context.group)
