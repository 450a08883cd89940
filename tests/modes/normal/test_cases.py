"""Every named case against the oracle, under every schedule and block count, over every fabric."""

from __future__ import annotations

from typing import Any

import pytest

from builds import BLOCK_COUNTS, FABRICS, SANITIZED, SCHEDULES, schedules
from cases import CASES, Case
from deep_ep_py.testing import run_ranks
from harness import MANY_RANKS, Trial, make_buffer, round_trip, under_schedules


def on_each_rank(group: Any, trial: Trial, fabric: str) -> None:
    buffer = make_buffer(group, trial.case, fabric)
    for blocks in BLOCK_COUNTS:
        round_trip(buffer, buffer.rank, trial, min(blocks, trial.case.max_blocks))


@pytest.mark.parametrize(
    ("case", "fabric"),
    [
        pytest.param(case, fabric, id=f"{case.name}-{fabric}")
        for case in CASES
        for fabric in ((case.fabric,) if case.fabric else FABRICS)
        if not (SANITIZED and case.ranks > MANY_RANKS)  # takes half a minute and shows nothing that fewer ranks do not
        if fabric != "ibgda" or case.ranks <= MANY_RANKS  # more queue pairs than fit; test_network_counts.py covers 64
    ],
)
def test_case(case: Case, fabric: str) -> None:
    trial = Trial.of(case)
    count = SCHEDULES if case.ranks <= MANY_RANKS else max(2, SCHEDULES // 10)  # each schedule takes seconds
    under_schedules(case.ranks, on_each_rank, trial, fabric, count=count)


@pytest.mark.parametrize("fabric", FABRICS)
def test_a_schedule_replays(fabric: str) -> None:
    """The hash of all events is a function of the seed: equal for equal seeds, different for different ones."""
    trial = Trial.of(CASES[0])

    def events(seed: int) -> int:
        return run_ranks(trial.case.ranks, on_each_rank, trial, fabric, seed=seed).event_hash

    first = [events(seed) for seed in schedules(3)]
    assert first == [events(seed) for seed in schedules(3)]
    assert len(set(first)) == 3
