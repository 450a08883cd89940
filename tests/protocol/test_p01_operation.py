"""P1: every collective call is an operation, numbered on the device; all ranks issue them in the same order."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations, product
from typing import Any

import pytest

import deep_ep_py as deep_ep
from builds import BUILD, FABRICS
from cases import BY_NAME, Case
from harness import Trial, dispatch_arguments, make_buffer, under_schedules


@pytest.mark.parametrize("fabric", FABRICS)
def test_every_kind_of_call_takes_a_number(fabric: str) -> None:
    """A rank with nothing to send or receive takes one too: if only rows took numbers, ranks would disagree on the
    region of the next call."""
    trials = [Trial.of(BY_NAME[name]) for name in ("ranks_that_send_nothing", "nothing_routed", "all_to_one_rank")]

    def on_each_rank(group: Any) -> int:
        buffer = make_buffer(group, trials[0].case, fabric)
        for turn in range(5):
            trial = trials[turn % 3]
            results = buffer.dispatch(**dispatch_arguments(trial.work, buffer.rank))
            trial.check_dispatch(buffer.rank, results)
            # An odd number of operations per turn, so that each kind uses each region.
            trial.check_combine(buffer.rank, trial.combine(buffer, buffer.rank, results[4]))
            trial.check_cached(buffer.rank, buffer.dispatch(trial.work.x[buffer.rank], handle=results[4]))
        return buffer.stats()["operations"]

    assert all(counts == [15] * 4 for counts in under_schedules(4, on_each_rank))


@pytest.mark.parametrize("fabric", FABRICS)
def test_queued_calls_keep_their_order(fabric: str) -> None:
    """Calls are queued without waiting: the host has not seen the numbers, and the kernels of one call may start while
    those of the previous call still run on other ranks."""
    trial = Trial.of(BY_NAME["uniform"])

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, trial.case, fabric)
        rank = buffer.rank
        handle = buffer.dispatch(**dispatch_arguments(trial.work, rank))[4]
        combined = [trial.combine(buffer, rank, handle, biases, async_finish=True) for biases in (0, 1, 2)]
        rows = [buffer.dispatch(trial.work.x[rank], handle=handle, async_finish=True) for _ in range(3)]
        for biases, results in enumerate(combined):
            results[2].current_stream_wait()
            trial.check_combine(rank, results, biases)
        for results in rows:
            results[5].current_stream_wait()
            trial.check_cached(rank, results)

    under_schedules(4, on_each_rank)


@pytest.mark.parametrize("fabric", FABRICS)
def test_buffers_count_on_their_own(fabric: str) -> None:
    """Two Buffers of one group are used alternately and unevenly: numbers, words and regions belong to the Buffer."""
    trials = [Trial.of(BY_NAME["uniform"], seed=1), Trial.of(BY_NAME["skewed"], seed=2)]

    def on_each_rank(group: Any) -> list[int]:
        buffers = [make_buffer(group, trials[0].case, fabric) for _ in range(2)]
        rank = buffers[0].rank
        for turn in (0, 1, 1, 0, 1):
            trial = trials[turn]
            results = buffers[turn].dispatch(**dispatch_arguments(trial.work, rank, config=deep_ep.Config(num_sms=2)))
            trial.check_dispatch(rank, results)
            trial.check_combine(rank, trial.combine(buffers[turn], rank, results[4]))
        return [buffer.stats()["operations"] for buffer in buffers]

    assert all(counts == [[4, 6]] * 4 for counts in under_schedules(4, on_each_rank))


OPERATIONS = 3
Step = tuple[str, int]


def orders(regions: int, finishes: tuple[int, ...]) -> Iterator[tuple[Step, ...]]:
    """Yield each order of begins, by number, among `finishes` that a Buffer with `regions` regions allows (P3)."""

    def go_on(steps: tuple[Step, ...], begun: int, finished: int) -> Iterator[tuple[Step, ...]]:
        if finished == OPERATIONS:
            yield steps
            return
        if begun < OPERATIONS and begun - regions not in {*range(begun)} - {*finishes[:finished]}:
            yield from go_on((*steps, ("begin", begun)), begun + 1, finished)
        if finishes[finished] < begun:
            yield from go_on((*steps, ("finish", finishes[finished])), begun, finished + 1)

    return go_on((), 0, 0)


@pytest.mark.parametrize("regions", [1, 2, 3])
@pytest.mark.parametrize("fabric", FABRICS)
def test_begins_among_finishes_in_different_orders(fabric: str, regions: int) -> None:
    """Equal orders of begins and equal orders of finishes suffice, however the two are interleaved on each rank. If a
    begin waited for the counts of the peers, an operation that this rank has queued after it (b0 b1 f0 f1) could be one
    that a peer waits for before it begins (b0 f0 b1 f1). The test tries every pair of orders."""
    trials = [Trial.of(Case("apart", 2, 9, hidden=64, topk=2, experts=4), seed=seed) for seed in range(OPERATIONS)]
    pairs = [
        pair
        for finishes in permutations(range(OPERATIONS))
        for pair in product(orders(regions, finishes), repeat=2)
        if BUILD == "fast" or (pair[0] != pair[1] and finishes == (0, 1, 2))
    ]

    def on_each_rank(group: Any) -> int:
        buffer = make_buffer(group, trials[0].case, fabric, regions=regions, timeout=20)
        rank = buffer.rank
        for pair in pairs:
            pending = {}
            for step, number in pair[rank]:
                if step == "finish":
                    trials[number].check_dispatch(rank, pending.pop(number).finish())
                else:
                    arguments = dispatch_arguments(trials[number].work, rank)
                    pending[number] = buffer._begin_dispatch(**arguments, finish_later=True)
        return len(pairs)

    runs = under_schedules(2, on_each_rank, count=3 if BUILD == "fast" else 1)
    assert {count for counts in runs for count in counts} == {len(pairs)}
