"""Guarantees of combine besides the sums of the named cases."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import oracle
from builds import FABRICS
from cases import BY_NAME, Case
from deep_ep_py.testing import run_ranks
from harness import Trial, dispatch_arguments, make_buffer, under_schedules


@pytest.mark.parametrize("weights", [False, True], ids=["rows_only", "with_weights"])
@pytest.mark.parametrize("biases", [0, 1, 2])
@pytest.mark.parametrize("fabric", FABRICS)
def test_biases_and_weights(fabric: str, biases: int, weights: bool) -> None:
    trial = Trial.of(BY_NAME["unrouted_selections"])

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, trial.case, fabric)
        handle = buffer.dispatch(**dispatch_arguments(trial.work, buffer.rank))[4]
        trial.check_combine(buffer.rank, trial.combine(buffer, buffer.rank, handle, biases, weights), biases, weights)

    under_schedules(trial.case.ranks, on_each_rank)


def with_rows(trial: Trial, rows: list[torch.Tensor]) -> Trial:
    """Return the same trial with other expert outputs, without bias."""
    expert = trial.expert
    tokens = [len(x) for x in trial.work.x]
    expected = {0: oracle.combine(trial.received, tokens, rows, expert.topk_weights)}
    return Trial(
        trial.case, trial.work, trial.received, type(expert)(rows, expert.topk_weights, expert.biases, expected)
    )


def sum_on_each_rank(group: Any, trial: Trial, fabric: str) -> torch.Tensor:
    buffer = make_buffer(group, trial.case, fabric)
    handle = buffer.dispatch(**dispatch_arguments(trial.work, buffer.rank))[4]
    return trial.combine(buffer, buffer.rank, handle)[0]


@pytest.mark.parametrize("fabric", FABRICS)
def test_order_of_summation(fabric: str) -> None:
    """Terms differ so much in size that any other order of summation, or a second rounding, yields other bits."""
    trial = Trial.of(Case("order", ranks=8, tokens=6, hidden=64, topk=8, experts=8))
    # Every rank has one row of each token. The first two cancel, so the loss of the others depends on their position.
    rows = list(trial.expert.x)
    rows[0] = (rows[0].float() * 2**20).to(torch.bfloat16)
    rows[1] = -rows[0]
    trial = with_rows(trial, rows)
    reverse = oracle.combine(trial.received[::-1], [6] * 8, rows[::-1], trial.expert.topk_weights[::-1])
    shows = [not oracle.same_bits(other.x, own.x) for other, own in zip(reverse, trial.expert.expected[0])]
    assert all(shows), "the case no longer distinguishes orders: another one gives the same bits"
    for sums in under_schedules(8, sum_on_each_rank, trial, fabric):
        for rank, combined in enumerate(sums):
            oracle.check_combined(combined, None, trial.expert.expected[0][rank])


def test_special_values() -> None:
    """Sums that overflow bf16, denormals, infinities and NaN give the results of fp32 arithmetic and one rounding."""
    trial = Trial.of(Case("special", ranks=4, tokens=8, hidden=64, topk=4, experts=4, routing="everywhere"))
    values = torch.tensor([0.0, -0.0, 3.3895e38, -3.3895e38, 1e-40, -1e-40, 1e-38, float("inf"), float("-inf"), 1.0])
    random = torch.Generator().manual_seed(3)
    rows = [values[torch.randint(10, x.shape, generator=random)].to(torch.bfloat16) for x in trial.expert.x]
    trial = with_rows(trial, rows)
    for rank, combined in enumerate(run_ranks(4, sum_on_each_rank, trial, "peer", seed=1)):
        expected = trial.expert.expected[0][rank].x
        nan = expected.isnan()
        assert nan.any() and expected.isinf().any(), "the case no longer covers special values"
        assert torch.equal(combined.isnan(), nan)
        zero = torch.zeros((), dtype=torch.bfloat16)
        assert oracle.same_bits(combined.where(~nan, zero), expected.where(~nan, zero))


@pytest.mark.parametrize("arena_bytes", [None, 0], ids=["published", "chunks"])
@pytest.mark.parametrize("fabric", FABRICS)
def test_rows_that_dispatch_returned(fabric: str, arena_bytes: int | None) -> None:
    """Combine recv_x itself: its rows are already in memory that peers can read."""
    trial = Trial.of(BY_NAME["uniform"])
    own = [part.x for part in trial.received]
    weights = [part.topk_weights for part in trial.received]
    expected = oracle.combine(trial.received, [len(x) for x in trial.work.x], own, weights)

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, trial.case, fabric, arena_bytes=arena_bytes)
        recv_x, _, recv_weights, _, handle, _ = buffer.dispatch(**dispatch_arguments(trial.work, buffer.rank))
        combined = buffer.combine(recv_x, handle, topk_weights=recv_weights)
        oracle.check_combined(combined[0], combined[1], expected[buffer.rank])

    under_schedules(trial.case.ranks, on_each_rank)


@pytest.mark.parametrize("arena_bytes", [None, 0], ids=["room", "no_room"])
@pytest.mark.parametrize("fabric", FABRICS)
def test_private_rows_are_copied_to_where_peers_can_read_them(fabric: str, arena_bytes: int | None) -> None:
    trial = Trial.of(BY_NAME["uniform"])

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, trial.case, fabric, arena_bytes=arena_bytes)
        handle = buffer.dispatch(**dispatch_arguments(trial.work, buffer.rank))[4]
        before = buffer.stats()
        combined = trial.combine(buffer, buffer.rank, handle, 0)
        after = buffer.stats()
        trial.check_combine(buffer.rank, combined, 0)
        helps = fabric == "peer" and arena_bytes is None
        assert after["copied"] - before["copied"] == helps
        assert after["direct"] - before["direct"] == helps and after["rounds"] - before["rounds"] == (not helps)
        del combined
        assert buffer.stats()["arena_used"] == before["arena_used"], "the copy must be freed when the combine ends"

    under_schedules(trial.case.ranks, on_each_rank)


def test_a_handle_serves_many_combines() -> None:
    trial = Trial.of(BY_NAME["uniform"])

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, trial.case, "weak")
        handle = buffer.dispatch(**dispatch_arguments(trial.work, buffer.rank))[4]
        before = [part.clone() for part in handle]
        for biases in (0, 2, 1, 0):
            trial.check_combine(buffer.rank, trial.combine(buffer, buffer.rank, handle, biases), biases)
        assert all(torch.equal(was, now) for was, now in zip(before, handle)), "a handle must not be modified"

    under_schedules(trial.case.ranks, on_each_rank)
