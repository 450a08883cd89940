"""P4: no rank stores into a region before its owner has freed it from its last use; each rank frees exactly once."""

from __future__ import annotations

from typing import Any

import pytest

from builds import FABRICS
from cases import BY_NAME, Case
from harness import Trial, barrier, dispatch_arguments, make_buffer, under_schedules


@pytest.mark.parametrize("arena_bytes", [None, 0], ids=["direct", "rounds"])
@pytest.mark.parametrize("regions", [1, 2, 3])
@pytest.mark.parametrize("fabric", FABRICS)
def test_a_rank_that_runs_ahead(fabric: str, regions: int, arena_bytes: int | None) -> None:
    """Three ranks begin as many operations as there are regions before the fourth has begun the first of them, lap
    after lap, while it may still be reading the previous lap. If a rank only waited for its own words, its counts and
    rows would land in a region that the fourth is still using."""
    trials = [Trial.of(BY_NAME["uniform"], seed=seed) for seed in range(3)]

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, trials[0].case, fabric, regions=regions, arena_bytes=arena_bytes)
        rank = buffer.rank
        for lap in range(3):
            if rank == 3:
                barrier(group)
            pending = [
                buffer._begin_dispatch(**dispatch_arguments(trials[(lap + n) % 3].work, rank), finish_later=True)
                for n in range(regions)
            ]
            if rank != 3:
                barrier(group)
            for n, operation in enumerate(pending):
                trials[(lap + n) % 3].check_dispatch(rank, operation.finish())

    under_schedules(4, on_each_rank)


@pytest.mark.parametrize("arena_bytes", [None, 0], ids=["direct", "rounds"])
@pytest.mark.parametrize("fabric", FABRICS)
def test_one_region(fabric: str, arena_bytes: int | None) -> None:
    """Each operation uses the region of the previous one. Ranks without tokens end theirs early and continue; if they
    did not wait, their next rows would overwrite rows that the others have not read yet, which differ."""
    case = Case("one_region", ranks=4, tokens=(0, 25, 0, 30), topk=2)
    trials = [Trial.of(case, seed=seed) for seed in (1, 2)]

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, case, fabric, regions=1, arena_bytes=arena_bytes)
        rank = buffer.rank
        handles = [buffer.dispatch(**dispatch_arguments(trial.work, rank))[4] for trial in trials]
        for turn in (0, 1, 1, 0, 1, 0):
            trials[turn].check_combine(rank, trials[turn].combine(buffer, rank, handles[turn]))
        for turn in (1, 0, 0, 1):
            trial = trials[turn]
            trial.check_cached(rank, buffer.dispatch(trial.work.x[rank], handle=handles[turn]))
            trial.check_combine(rank, trial.combine(buffer, rank, handles[turn]))

    under_schedules(4, on_each_rank, freeze=16)


@pytest.mark.parametrize(
    "name", ["ranks_that_send_nothing", "ranks_that_receive_nothing", "all_to_one_rank", "to_own_rank"]
)
@pytest.mark.parametrize("fabric", FABRICS)
def test_sources_with_no_rows(fabric: str, name: str) -> None:
    """Pairs that exchange no rows still free and wait for each other: if a rank only freed the sources it had received
    from, the others would wait in the next lap, or enter a region that is still being read."""
    idle, busy = Trial.of(BY_NAME[name]), Trial.of(BY_NAME["uniform"])

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, idle.case, fabric)
        for trial in (idle, idle, idle, busy, idle, busy, busy):
            results = buffer.dispatch(**dispatch_arguments(trial.work, buffer.rank))
            trial.check_dispatch(buffer.rank, results)
            trial.check_combine(buffer.rank, trial.combine(buffer, buffer.rank, results[4]))

    under_schedules(4, on_each_rank)


@pytest.mark.parametrize("arena_bytes", [None, 0], ids=["direct", "rounds"])
@pytest.mark.parametrize("fabric", FABRICS)
def test_an_offer_that_no_rank_needs(fabric: str, arena_bytes: int | None) -> None:
    """No rank sends a row, yet every receiver offers its (empty) output, and the offers must have arrived before the
    region is freed. Otherwise a late offer lands in the next use of the region and names an output that no longer
    exists."""
    empty, full = Trial.of(BY_NAME["nothing_routed"]), Trial.of(BY_NAME["all_to_one_rank"])

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, empty.case, fabric, arena_bytes=arena_bytes)
        for trial in (empty, full, empty, empty, full, full, empty):
            results = buffer.dispatch(**dispatch_arguments(trial.work, buffer.rank))
            trial.check_dispatch(buffer.rank, results)

    under_schedules(4, on_each_rank)


@pytest.mark.parametrize("fabric", FABRICS)
def test_one_rank_alone_frees_its_region(fabric: str) -> None:
    """A rank is its own peer: the rule also holds for its own region."""
    trial = Trial.of(Case("alone", ranks=1, tokens=5, topk=2, experts=2))

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, trial.case, fabric)
        for _ in range(6):
            results = buffer.dispatch(**dispatch_arguments(trial.work, 0))
            trial.check_dispatch(0, results)
            trial.check_combine(0, trial.combine(buffer, 0, results[4]))

    under_schedules(1, on_each_rank)
