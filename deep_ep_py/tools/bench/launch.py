"""Running a function on every rank: in processes started here, or in those that torchrun has started."""

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
from deep_ep_py.tools.bench.processes import run_processes
from deep_ep_py.tools.bench.rank_process import be_killed_with_parent

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


def under_torchrun() -> bool:
    """Return whether this process is a rank that torchrun started."""
    return "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ


def torchrun_rank() -> int:
    """Return this process's rank under torchrun, 0 otherwise."""
    return int(os.environ["RANK"]) if under_torchrun() else 0


def require_torchrun_ranks(ranks: int) -> None:
    """Raise ValueError if torchrun has started a different number of ranks."""
    world = int(os.environ["WORLD_SIZE"])
    if world != ranks:
        raise ValueError(f"--ranks is {ranks}; expected {world}, the number of ranks that torchrun started")


def launch(function: RankFunction, ranks: int, args: tuple[Any, ...], on_event: Callable[[Event], None]) -> Any:
    """Run `function(context, *args)` on all ranks, each pinned to one core, with one thread each.

    Parameters
    ----------
    function
        A function of a module that ranks can import, which may be the one that `python -m` runs.
    ranks
        Number of ranks; under torchrun it must be torchrun's.
    args
        Further arguments, which must be picklable.
    on_event
        Receives what rank 0 emits, in the calling process.

    Returns
    -------
    object
        The result of the function on rank 0; under torchrun, its result on this rank.

    Raises
    ------
    RankFailed
        A rank raised or ended; the message says which and how. All ranks have been ended.
    ValueError
        `ranks` is not torchrun's number, or `function` cannot be imported.
    """
    if under_torchrun():
        require_torchrun_ranks(ranks)
        be_killed_with_parent()
        return _run_rank(function, torchrun_rank(), ranks, "env://", on_event, args)
    return run_processes(ranks, function, args, on_event)


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
        result = _run_rank(call, rank, ranks, init_method, emit, given)
        connection.send(("done", result if rank == 0 else None))
    except Exception:
        raised()


def _run_rank(
    function: RankFunction, rank: int, ranks: int, init_method: str, emit: Callable[[Event], None], args: Any
) -> Any:
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
