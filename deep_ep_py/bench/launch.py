"""Run a function on every rank: in processes started here, or in those that torchrun has started."""

from __future__ import annotations

import gc
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing import get_context
from torch.multiprocessing.spawn import spawn

Event = dict[str, Any]
_TIMEOUT = timedelta(seconds=600)
_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class RankContext:
    """What a rank's function gets."""

    rank: int
    ranks: int
    group: dist.ProcessGroup
    emit: Callable[[Event], None]
    """Reports progress; only rank 0's reports arrive."""


RankFunction = Callable[..., Any]


def under_torchrun() -> bool:
    """Say whether this process is a rank that torchrun started."""
    return "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ


def torchrun_rank() -> int:
    """Return this process's rank under torchrun, 0 otherwise."""
    return int(os.environ["RANK"]) if under_torchrun() else 0


def launch(function: RankFunction, ranks: int, args: tuple[Any, ...], on_event: Callable[[Event], None]) -> Any:
    """Run `function(context, *args)` on all ranks, each pinned to one core, with one thread each.

    Parameters
    ----------
    function
        A module-level function.
    ranks
        How many ranks; under torchrun it must be torchrun's number.
    args
        Passed on; picklable.
    on_event
        Gets what rank 0 emits, in the calling process.

    Returns
    -------
    object
        What the function returned on rank 0; under torchrun, what it returned on this rank.

    Raises
    ------
    torch.multiprocessing.ProcessRaisedException
        A rank raised; the message holds its traceback. The other ranks are ended.
    """
    if under_torchrun():
        world = int(os.environ["WORLD_SIZE"])
        if world != ranks:
            raise ValueError(f"--ranks is {ranks}; expected {world}, the number of ranks that torchrun started")
        return _run_rank(function, torchrun_rank(), ranks, "env://", on_event, args)
    with tempfile.TemporaryDirectory(prefix="deep_ep_py.") as folder, _one_thread_per_rank():
        return _spawn(function, ranks, f"file://{Path(folder) / 'rendezvous'}", args, on_event)


def _spawn(
    function: RankFunction, ranks: int, init_method: str, args: tuple[Any, ...], on_event: Callable[[Event], None]
) -> Any:
    events = get_context("spawn").SimpleQueue()
    processes = spawn(_spawned_rank, (ranks, function, init_method, events, args), nprocs=ranks, join=False)
    result = None
    try:
        running = True
        while running:
            running = not processes.join(timeout=_POLL_SECONDS)
            while not events.empty():
                kind, value = events.get()
                if kind == "result":
                    result = value
                else:
                    on_event(value)
    finally:
        for process in processes.processes:
            if process.is_alive():
                process.terminate()
    return result


def _spawned_rank(rank: int, ranks: int, function: RankFunction, init_method: str, events: Any, args: Any) -> None:
    result = _run_rank(function, rank, ranks, init_method, lambda event: events.put(("event", event)), args)
    if rank == 0:
        events.put(("result", result))


def _run_rank(
    function: RankFunction, rank: int, ranks: int, init_method: str, emit: Callable[[Event], None], args: Any
) -> Any:
    pin_to_core(rank)
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with warnings.catch_warnings():
        dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=ranks, timeout=_TIMEOUT)
    try:
        group = dist.group.WORLD
        assert group is not None
        return function(RankContext(rank, ranks, group, emit if rank == 0 else _discard), *args)
    finally:
        # A group that only a reference cycle still holds would die with the interpreter, and abort the process.
        gc.collect()
        dist.destroy_process_group()


def _discard(event: Event) -> None:
    del event


def pin_to_core(rank: int) -> None:
    """Bind this process to one of the cores it may use: rank after rank, around and around."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})


@contextmanager
def _one_thread_per_rank() -> Iterator[None]:
    """Set what a child's torch reads while it is imported."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before
