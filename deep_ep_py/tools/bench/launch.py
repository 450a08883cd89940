"""Running a function on every rank: in processes started here, or in those that torchrun has started."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from deep_ep_py.tools.bench.processes import run_processes
from deep_ep_py.tools.bench.rank_job import Event, RankFunction, run_rank
from deep_ep_py.tools.bench.rank_process import be_killed_with_parent


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
        return run_rank(function, torchrun_rank(), ranks, "env://", on_event, args)
    return run_processes(ranks, function, args, on_event)
