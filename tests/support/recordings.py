"""Timelines of a dispatch and a combine by ranks of this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cases import Case
from deep_ep_py.testing import run_ranks, sleep
from harness import Trial, dispatch_arguments, make_buffer


def record(path: Path, case: Case, fabric: str, late: int = -1, seconds: float = 0.0, times: int = 1) -> list[Path]:
    """Record the calls, to the dispatch of which rank `late` comes `seconds` late; return the files."""
    trial = Trial.of(case)

    def on_each_rank(group: Any) -> None:
        with make_buffer(group, case, fabric, timeout=5.0) as buffer:
            rank = buffer.rank
            with buffer.trace(path):
                group.barrier()
                if rank == late:
                    sleep(seconds)
                for _ in range(times):
                    results = buffer.dispatch(**dispatch_arguments(trial.work, rank))
                    trial.check_dispatch(rank, results)
                    buffer.combine(trial.expert.x[rank], results[4])

    run_ranks(case.ranks, on_each_rank)
    return [path.with_name(f"{path.stem}.rank{rank}{path.suffix}") for rank in range(case.ranks)]
