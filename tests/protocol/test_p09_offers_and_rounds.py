"""P9: a receiver offers its output, or says that it takes rounds; no rank stores before the offer."""

from __future__ import annotations

from typing import Any

import pytest

from builds import FABRICS
from cases import Case, tight
from harness import Trial, dispatch_arguments, make_buffer, under_schedules

# Chunks of a stream exceed its slots, so an operation in rounds has several.
ROUNDS = Case("rounds", ranks=3, tokens=(60, 5, 30), hidden=16, topk=2, experts=6, num_nvl_bytes=tight(3, 16, 2, 6))


@pytest.mark.parametrize("fabric", FABRICS)
def test_rounds_next_to_the_next_operation(fabric: str) -> None:
    """While one operation goes through its region in rounds, the next sends its counts, and has its output offered,
    in the next region. Rounds that counted on being alone would mix rows of both."""
    trials = [Trial.of(ROUNDS, seed=1), Trial.of(ROUNDS, seed=2)]

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, ROUNDS, fabric, arena_bytes=0)
        rank = buffer.rank
        first = buffer._begin_dispatch(**dispatch_arguments(trials[0].work, rank), finish_later=True)
        second = buffer._begin_dispatch(**dispatch_arguments(trials[1].work, rank), finish_later=True)
        results = first.finish(), second.finish()
        for trial, result in zip(trials, results):
            trial.check_dispatch(rank, result)
        # And the next two, queued without waiting.
        queued = [trial.combine(buffer, rank, result[4], async_finish=True) for trial, result in zip(trials, results)]
        for trial, combined in zip(trials, queued):
            combined[2].current_stream_wait()
            trial.check_combine(rank, combined)

    under_schedules(3, on_each_rank)


@pytest.mark.parametrize("fabric", FABRICS)
def test_each_receiver_chooses(fabric: str) -> None:
    """One receiver's arena is full, the others' is not: within one operation a sender stores straight into some
    outputs and goes in rounds to another, which only the offers tell it."""
    trial = Trial.of(Case("mixed", ranks=3, tokens=40, hidden=64, topk=3, experts=6))

    def on_each_rank(group: Any) -> list[dict[str, int]]:
        buffer = make_buffer(group, trial.case, fabric, arena_bytes=1 << 16)
        rank = buffer.rank
        kept = []
        for _ in range(8):
            results = buffer.dispatch(**dispatch_arguments(trial.work, rank))
            trial.check_dispatch(rank, results)
            if rank == 1:
                kept.append(results)
        for results in kept:
            trial.check_dispatch(rank, results)
        return buffer.stats()

    for stats in under_schedules(3, on_each_rank):
        assert stats[1]["rounds"] > 0, "the case has lost its point: the arena was never full"
        if fabric == "peer":
            assert stats[0]["rounds"] == stats[2]["rounds"] == 0


@pytest.mark.parametrize("fabric", FABRICS)
def test_rounds_and_direct_take_turns(fabric: str) -> None:
    """The words of rounds rest while an operation is direct, and the other way round; either must find them as it
    left them."""
    trial = Trial.of(ROUNDS)

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, ROUNDS, fabric, arena_bytes=1 << 14)
        kept: list[Any] = []
        for turn in range(9):
            results = buffer.dispatch(**dispatch_arguments(trial.work, buffer.rank))
            trial.check_dispatch(buffer.rank, results)
            kept = [] if turn % 3 == 2 else [*kept, results]

    under_schedules(3, on_each_rank)
