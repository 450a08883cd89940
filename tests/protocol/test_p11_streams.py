"""P11: no wait is queued behind that of another row stream; chunks may arrive in any order, and operations may be
finished in any order."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest

import deep_ep_py as deep_ep
from builds import FABRICS
from cases import Case, tight
from harness import Trial, dispatch_arguments, make_buffer, under_schedules

MANY_CHUNKS = Case(
    "many_chunks", ranks=3, tokens=(70, 0, 20), hidden=8, topk=2, experts=6, num_nvl_bytes=tight(3, 8, 2, 6)
)


@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("fabric", FABRICS)
def test_chunks_out_of_order(fabric: str, blocks: int) -> None:
    """Chunks of a row stream are in all its slots at once and overtake each other. With one word per row stream, a
    count of two would say that two chunks have arrived but not which, and rows of the first would be read before they
    arrive."""
    trial = Trial.of(MANY_CHUNKS)

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, MANY_CHUNKS, fabric, arena_bytes=0)
        config = deep_ep.Config(num_sms=blocks)
        results = buffer.dispatch(**dispatch_arguments(trial.work, buffer.rank, config=config))
        trial.check_dispatch(buffer.rank, results)
        trial.check_combine(buffer.rank, trial.combine(buffer, buffer.rank, results[4], config=config))

    under_schedules(3, on_each_rank)


@pytest.mark.parametrize("fabric", FABRICS)
def test_all_streams_by_few_warps(fabric: str) -> None:
    """More row streams than warps: a warp that blocked on its first row stream would wait for a peer that likewise
    waits for it."""
    case = Case("streams", ranks=8, tokens=20, hidden=8, topk=4, experts=8)
    trial = Trial.of(case)

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, case, fabric, arena_bytes=0)
        config = deep_ep.Config(num_sms=1)
        results = buffer.dispatch(**dispatch_arguments(trial.work, buffer.rank, config=config))
        trial.check_dispatch(buffer.rank, results)
        trial.check_combine(buffer.rank, trial.combine(buffer, buffer.rank, results[4], config=config))

    under_schedules(8, on_each_rank, count=3)


@pytest.mark.parametrize("arena_bytes", [None, 0], ids=["direct", "rounds"])
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("fabric", FABRICS)
def test_operations_finish_in_any_order(fabric: str, count: int, arena_bytes: int | None) -> None:
    """Two or three operations are open at once and finished in each order (the same on all ranks), with calls of
    other kinds in between, like two overlapping micro-batches."""
    trials = [Trial.of(Case("open", ranks=3, tokens=7 + n, hidden=8 << n, topk=2, experts=6), seed=n) for n in range(3)]

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, trials[0].case, fabric, regions=3, arena_bytes=arena_bytes)
        rank = buffer.rank
        for order in permutations(range(count)):
            pending = [
                buffer._begin_dispatch(**dispatch_arguments(trials[n].work, rank), finish_later=True)
                for n in range(count)
            ]
            results = {n: pending[n].finish() for n in order}
            for n in order:
                trials[n].check_dispatch(rank, results[n])
            for n in reversed(order):
                trials[n].check_combine(rank, trials[n].combine(buffer, rank, results[n][4]))

    under_schedules(3, on_each_rank)


@pytest.mark.parametrize("fabric", FABRICS)
def test_other_calls_between_begin_and_finish(fabric: str) -> None:
    """A dispatch stays open while a combine and a cached dispatch begin and end."""
    trial = Trial.of(Case("between", ranks=3, tokens=9, hidden=40, topk=2, experts=6))

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, trial.case, fabric, regions=3)
        rank = buffer.rank
        handle = buffer.dispatch(**dispatch_arguments(trial.work, rank))[4]
        for _ in range(4):
            pending = buffer._begin_dispatch(**dispatch_arguments(trial.work, rank), finish_later=True)
            trial.check_combine(rank, trial.combine(buffer, rank, handle))
            trial.check_cached(rank, buffer.dispatch(trial.work.x[rank], handle=handle))
            results = pending.finish()
            trial.check_dispatch(rank, results)
            handle = results[4]

    under_schedules(3, on_each_rank)
