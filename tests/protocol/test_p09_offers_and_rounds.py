"""P9: a receiver offers its output or announces rounds; no rank stores before the offer."""

from __future__ import annotations

from typing import Any

import pytest

from builds import FABRICS
from cases import Case, tight
from harness import Trial, dispatch_arguments, make_buffer, under_schedules

# A row stream has more chunks than slots, so an operation in rounds has several rounds.
ROUNDS = Case("rounds", ranks=3, tokens=(60, 5, 30), hidden=16, topk=2, experts=6, num_nvl_bytes=tight(3, 16, 2, 6))


@pytest.mark.parametrize("fabric", FABRICS)
def test_rounds_next_to_the_next_operation(fabric: str) -> None:
    """While one operation goes through its region in rounds, the next one sends its counts and has its output offered
    in the next region. Rounds that assumed to be alone would mix rows of both."""
    trials = [Trial.of(ROUNDS, seed=1), Trial.of(ROUNDS, seed=2)]

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, ROUNDS, fabric, arena_bytes=0)
        rank = buffer.rank
        first = buffer._begin_dispatch(**dispatch_arguments(trials[0].work, rank), finish_later=True)
        second = buffer._begin_dispatch(**dispatch_arguments(trials[1].work, rank), finish_later=True)
        results = first.finish(), second.finish()
        for trial, result in zip(trials, results):
            trial.check_dispatch(rank, result)
        # The next two are queued without waiting.
        queued = [trial.combine(buffer, rank, result[4], async_finish=True) for trial, result in zip(trials, results)]
        for trial, combined in zip(trials, queued):
            combined[2].current_stream_wait()
            trial.check_combine(rank, combined)

    under_schedules(3, on_each_rank)


@pytest.mark.parametrize("fabric", FABRICS)
def test_each_receiver_chooses(fabric: str) -> None:
    """Only one receiver has a full arena: within one operation a sender stores straight into some outputs and uses
    rounds for another, which it only learns from the offers."""
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
        assert stats[1]["rounds"] > 0, "the case no longer tests rounds: the arena was never full"
        if fabric == "peer":
            assert stats[0]["rounds"] == stats[2]["rounds"] == 0


@pytest.mark.parametrize("fabric", FABRICS)
def test_rounds_and_direct_take_turns(fabric: str) -> None:
    """The words of rounds are unused while an operation is direct, and vice versa; each kind must find its words as it
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
