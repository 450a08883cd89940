"""What a rank's process does: the job that it was started for."""

from __future__ import annotations

import gc
import importlib
import os
import pickle
import sys
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import reduce
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from deep_ep_py.tools.bench.machine import usable_cores

Event = dict[str, Any]
_TIMEOUT = timedelta(seconds=600)


@dataclass(frozen=True)
class RankContext:
    """The first argument of a rank's function."""

    rank: int
    ranks: int
    group: dist.ProcessGroup
    emit: Callable[[Event], None]
    """Reports progress; only rank 0's reports arrive."""


RankFunction = Callable[..., Any]


def run_job(connection: Connection, rank: int, job: bytes) -> None:
    """Run the job of `processes.run_processes` in a rank's process, and send back its outcome."""
    function: Any

    def raised() -> NoReturn:
        connection.send(("raised", traceback.format_exc()))
        sys.exit(1)

    def emit(event: Event) -> None:
        connection.send(("event", event))

    def call(context: RankContext, *args: Any) -> Any:
        try:
            return function(context, *args)
        except BaseException:  # noqa: B036 - the parent raises it
            raised()  # before the group ends, which makes the other ranks raise

    try:
        (module, name), ranks, init_method, given = pickle.loads(job)
        function = reduce(getattr, name.split("."), importlib.import_module(module))
        result = run_rank(call, rank, ranks, init_method, emit, given)
        connection.send(("done", result if rank == 0 else None))
    except Exception:
        raised()


def run_rank(
    function: RankFunction, rank: int, ranks: int, init_method: str, emit: Callable[[Event], None], args: Any
) -> Any:
    """Run a function as one rank of a gloo group, on a core of its own."""
    pin_to_core(rank)
    torch.set_num_threads(1)
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE"):  # all on this machine
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with warnings.catch_warnings():
        dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=ranks, timeout=_TIMEOUT)
    try:
        group = dist.group.WORLD
        assert group is not None
        return function(RankContext(rank, ranks, group, emit if rank == 0 else _discard), *args)
    finally:
        # A group kept alive only by a reference cycle would die with the interpreter and abort the process.
        gc.collect()
        dist.destroy_process_group()


def _discard(event: Event) -> None:
    del event


def pin_to_core(rank: int) -> None:
    """Bind this process to one of the cores that it may use, round-robin by rank."""
    cores = usable_cores()
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
