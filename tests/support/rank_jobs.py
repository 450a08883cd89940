"""What tests have ranks' processes run: functions of a module that these can import."""

from __future__ import annotations

import os
import signal
import subprocess
import time

import torch.distributed as dist

from deep_ep_py.bench.launch import RankContext


def wait_forever(context: RankContext) -> None:
    """Until the process is ended."""
    context.emit({"pid": os.getpid()})
    time.sleep(1000)


def one_fails(context: RankContext, how: str) -> None:
    """The last rank, which has started a process; the others wait for it."""
    if context.rank == context.ranks - 1:
        child = subprocess.Popen(["sleep", "1000"], stdin=subprocess.DEVNULL)
        if how == "raises":
            raise RuntimeError(f"out of luck, child {child.pid}")
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier(group=context.group)
