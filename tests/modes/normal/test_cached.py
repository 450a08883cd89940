"""Cached dispatch: it reuses the routing of an earlier dispatch and skips the counts."""

from __future__ import annotations

from typing import Any

import pytest

import oracle
from builds import FABRICS
from cases import BY_NAME
from harness import Trial, dispatch_arguments, make_buffer, under_schedules


@pytest.mark.parametrize("arena_bytes", [None, 0], ids=["direct", "rounds"])
@pytest.mark.parametrize("fabric", FABRICS)
def test_other_rows_by_the_same_handle(fabric: str, arena_bytes: int | None) -> None:
    trial = Trial.of(BY_NAME["uneven_tokens"])
    others = [
        oracle.Workload(
            trial.work.num_experts, [x * factor for x in trial.work.x], trial.work.topk_idx, trial.work.topk_weights
        )
        for factor in (2, -3, 0.5)
    ]
    expected = [oracle.dispatch(other) for other in others]

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, trial.case, fabric, arena_bytes=arena_bytes)
        rank = buffer.rank
        handle = buffer.dispatch(**dispatch_arguments(trial.work, rank))[4]
        rows = [buffer.dispatch(other.x[rank], handle=handle)[0] for other in others]
        for got, wanted in zip(rows, expected):
            wrong = oracle.difference("recv_x", got, wanted[rank].x)
            assert wrong is None, wrong

    under_schedules(trial.case.ranks, on_each_rank)


@pytest.mark.parametrize("fabric", FABRICS)
def test_other_hidden_size_by_the_same_handle(fabric: str) -> None:
    """A handle is a routing: rows of any size may use it."""
    trial = Trial.of(BY_NAME["uniform"])
    narrow = [x[:, :8].contiguous() for x in trial.work.x]

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, trial.case, fabric)
        handle = buffer.dispatch(**dispatch_arguments(trial.work, buffer.rank))[4]
        got = buffer.dispatch(narrow[buffer.rank], handle=handle)[0]
        assert oracle.difference("recv_x", got, trial.received[buffer.rank].x[:, :8]) is None

    under_schedules(trial.case.ranks, on_each_rank)


def test_handles_of_two_routings_take_turns() -> None:
    first, second = Trial.of(BY_NAME["uniform"], seed=1), Trial.of(BY_NAME["all_to_one_rank"], seed=2)

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, first.case, "weak")
        rank = buffer.rank
        handles = [buffer.dispatch(**dispatch_arguments(trial.work, rank))[4] for trial in (first, second)]
        for turn in (0, 1, 1, 0):
            trial = (first, second)[turn]
            trial.check_cached(rank, buffer.dispatch(trial.work.x[rank], handle=handles[turn]))
            trial.check_combine(rank, trial.combine(buffer, rank, handles[turn]))

    under_schedules(first.case.ranks, on_each_rank)


@pytest.mark.parametrize("fabric", FABRICS)
def test_as_autograd_uses_it(fabric: str) -> None:
    """The backward of dispatch is a combine, that of combine a cached dispatch; handles of several layers are alive."""
    trials = [Trial.of(BY_NAME["uniform"], seed=seed) for seed in (1, 2, 3)]

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, trials[0].case, fabric)
        rank = buffer.rank
        layers = []
        for trial in trials:
            results = buffer.dispatch(**dispatch_arguments(trial.work, rank))
            trial.check_dispatch(rank, results)
            trial.check_combine(rank, trial.combine(buffer, rank, results[4]))
            layers.append((trial, results[4]))
        for trial, handle in reversed(layers):
            trial.check_cached(rank, buffer.dispatch(trial.work.x[rank], handle=handle))
            trial.check_combine(rank, trial.combine(buffer, rank, handle, weights=False), weights=False)

    under_schedules(trials[0].case.ranks, on_each_rank)
