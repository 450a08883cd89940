"""Guarantees of dispatch besides its values, which the named cases test."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import deep_ep_py as deep_ep
import oracle
from builds import FABRICS
from cases import BY_NAME, Case
from deep_ep_py.modes.normal.handles import record_of
from deep_ep_py.testing import run_ranks
from harness import Trial, as_received, dispatch_arguments, make_buffer, under_schedules


@pytest.mark.parametrize("fabric", FABRICS)
def test_without_topk(fabric: str) -> None:
    """Only rows: no indices or weights are sent or returned."""
    trial = Trial.of(BY_NAME["uniform"])

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, trial.case, fabric)
        rank = buffer.rank
        arguments = dispatch_arguments(trial.work, rank, topk_idx=None, topk_weights=None)
        recv_x, idx, weights, counts, handle, _ = buffer.dispatch(**arguments)
        assert idx is None and weights is None
        expected = trial.received[rank]
        assert oracle.difference("recv_x", recv_x, expected.x) is None and counts == expected.num_tokens_per_expert
        assert oracle.difference("recv_src_idx", record_of(handle).recv_src_idx, expected.src_idx) is None
        combined = trial.combine(buffer, rank, handle, weights=False)
        trial.check_combine(rank, combined, weights=False)

    under_schedules(trial.case.ranks, on_each_rank)


def test_config_may_be_left_out() -> None:
    trial = Trial.of(BY_NAME["two_ranks"])

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, trial.case, "peer")
        results = buffer.dispatch(**dispatch_arguments(trial.work, buffer.rank))
        trial.check_dispatch(buffer.rank, results)
        assert isinstance(results[5], deep_ep.EventOverlap)
        trial.check_combine(buffer.rank, trial.combine(buffer, buffer.rank, results[4]))

    run_ranks(trial.case.ranks, on_each_rank, seed=1)


def test_types_of_what_comes_back() -> None:
    trial = Trial.of(BY_NAME["two_ranks"])

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, trial.case, "peer")
        recv_x, idx, weights, counts, handle, event = buffer.dispatch(**dispatch_arguments(trial.work, buffer.rank))
        assert recv_x.dtype == torch.bfloat16 and idx.dtype == torch.int64 and weights.dtype == torch.float32
        assert all(part.is_contiguous() for part in (recv_x, idx, weights))
        assert isinstance(counts, list) and all(type(count) is int for count in counts)
        assert isinstance(handle, tuple) and len(handle) == 6
        assert handle[4].dtype == torch.bool and all(handle[part].dtype == torch.int32 for part in (0, 1, 2, 3, 5))
        assert isinstance(event, deep_ep.EventOverlap)

    run_ranks(trial.case.ranks, on_each_rank, seed=1)


@pytest.mark.parametrize("arena_bytes", [None, 0], ids=["direct", "rounds"])
@pytest.mark.parametrize("fabric", FABRICS)
def test_outputs_outlive_the_buffer(fabric: str, arena_bytes: int | None) -> None:
    trial = Trial.of(BY_NAME["uniform"])

    def on_each_rank(group: Any) -> Any:
        buffer = make_buffer(group, trial.case, fabric, arena_bytes=arena_bytes)
        # Without the handle, which keeps the Buffer alive.
        return as_received(buffer.dispatch(**dispatch_arguments(trial.work, buffer.rank)))

    outputs = run_ranks(trial.case.ranks, on_each_rank, seed=1)
    for rank, received in enumerate(outputs):
        oracle.check_received(received, trial.received[rank])


@pytest.mark.parametrize("fabric", FABRICS)
def test_inputs_may_change_once_it_has_returned(fabric: str) -> None:
    """A dispatch that has returned has read its inputs completely; none of them is still in flight."""
    trial = Trial.of(BY_NAME["uniform"])

    def on_each_rank(group: Any) -> Any:
        buffer = make_buffer(group, trial.case, fabric)
        arguments = dispatch_arguments(trial.work, buffer.rank)
        for name in ("x", "topk_idx", "topk_weights"):
            arguments[name] = arguments[name].clone()
        results = buffer.dispatch(**arguments)
        for name in ("x", "topk_idx", "topk_weights"):
            arguments[name].zero_()
        trial.check_dispatch(buffer.rank, results)

    under_schedules(trial.case.ranks, on_each_rank)


@pytest.mark.parametrize("fabric", FABRICS)
def test_async_finish(fabric: str) -> None:
    """With async_finish the rows are complete once the event has been waited for, and later operations may be queued
    before that."""
    trial = Trial.of(BY_NAME["uniform"])

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, trial.case, fabric)
        rank = buffer.rank
        first = buffer.dispatch(**dispatch_arguments(trial.work, rank), async_finish=True)
        combined = trial.combine(buffer, rank, first[4], async_finish=True)
        second = buffer.dispatch(trial.work.x[rank], handle=first[4], async_finish=True)
        second[5].current_stream_wait()
        trial.check_cached(rank, second)
        combined[2].current_stream_wait()
        trial.check_combine(rank, combined)
        first[5].current_stream_wait()
        trial.check_dispatch(rank, first)

    under_schedules(trial.case.ranks, on_each_rank)


def test_rows_are_bits() -> None:
    """Rows are copied without arithmetic: NaN payloads, infinities, denormals and both zeros arrive unchanged."""
    case = Case("bits", ranks=2, tokens=64, hidden=64, topk=1, experts=2)
    trial = Trial.of(case)
    for rank, x in enumerate(trial.work.x):
        x.copy_(torch.randint(-(2**15), 2**15, x.shape, dtype=torch.int16).view(torch.bfloat16))
        trial.work.topk_weights[rank].view(torch.int32).random_()
    trial = Trial.of_workload(case, trial.work)

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, case, "weak")
        trial.check_dispatch(buffer.rank, buffer.dispatch(**dispatch_arguments(trial.work, buffer.rank)))

    run_ranks(case.ranks, on_each_rank, seed=1)


def test_strided_and_shared_inputs() -> None:
    """Callers cannot pass a row stride: a view that is not contiguous is refused or copied, never misread."""
    trial = Trial.of(BY_NAME["two_ranks"])

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, trial.case, "peer")
        wide = torch.zeros(len(trial.work.x[buffer.rank]), 2 * trial.case.hidden, dtype=torch.bfloat16)
        wide[:, : trial.case.hidden] = trial.work.x[buffer.rank]
        view = wide[:, : trial.case.hidden]
        try:
            results = buffer.dispatch(**dispatch_arguments(trial.work, buffer.rank, x=view))
        except ValueError as error:
            assert "x" in str(error) and "contiguous" in str(error)
        else:
            trial.check_dispatch(buffer.rank, results)

    run_ranks(trial.case.ranks, on_each_rank, seed=1)
