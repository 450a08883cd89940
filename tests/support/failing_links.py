"""Links between ranks that fail, and the errors that each rank then raises."""

from __future__ import annotations

from typing import Any

import pytest

import deep_ep_py as deep_ep
from cases import BY_NAME
from harness import Trial, dispatch_arguments, make_buffer, under_schedules

TRIAL = Trial.of(BY_NAME["uniform"])


def errors(fabric: str, nic: deep_ep.NicOptions, timeout: float = 100.0) -> tuple[list[str], int]:
    """Return what each rank raises within some rounds of dispatch and combine, and how often the clock had to jump
    for it."""

    def on_each_rank(group: Any) -> str:
        buffer = make_buffer(group, TRIAL.case, fabric, nic=nic, timeout=timeout)
        rank = buffer.rank
        with pytest.raises(deep_ep.DeepEPError) as info:
            for _ in range(60):
                results = buffer.dispatch(**dispatch_arguments(TRIAL.work, rank))
                TRIAL.check_dispatch(rank, results)
                TRIAL.check_combine(rank, TRIAL.combine(buffer, rank, results[4]))
        with pytest.raises(deep_ep.DeepEPError, match="the Buffer is broken"):
            buffer.dispatch(**dispatch_arguments(TRIAL.work, rank))
        return f"{type(info.value).__name__}: {info.value}"

    runs = under_schedules(TRIAL.case.ranks, on_each_rank)
    return [said for run in runs for said in run], sum(run.stats["clock_jumps"] for run in runs)
