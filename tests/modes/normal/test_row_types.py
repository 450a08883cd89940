"""Rows of any element type of one or two bytes are dispatched bit by bit; sums are for bfloat16 only."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import deep_ep_py as deep_ep
from builds import FABRICS
from cases import BY_NAME
from deep_ep_py.modes.normal.handles import record_of
from deep_ep_py.testing import run_ranks
from harness import Trial, dispatch_arguments, make_buffer

TRIAL = Trial.of(BY_NAME["uniform"])
ONE_BYTE = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8)
TWO_BYTES = (torch.bfloat16, torch.float16, torch.int16)
OTHERS = (torch.float32, torch.int32, torch.float64, torch.complex64, torch.bool, torch.uint16)


def check(name: str, got: torch.Tensor, dtype: torch.dtype, expected: torch.Tensor) -> None:
    assert got.dtype == dtype and torch.equal(got.view(torch.uint8), expected.view(torch.uint8)), name


@pytest.mark.parametrize("fabric", FABRICS)
@pytest.mark.parametrize("dtype", [*ONE_BYTE, *TWO_BYTES], ids=str)
def test_rows_arrive_as_they_are(dtype: torch.dtype, fabric: str) -> None:
    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, TRIAL.case, fabric)
        rank = buffer.rank
        x, expected = TRIAL.work.x[rank].view(dtype), TRIAL.received[rank].x.view(dtype)
        recv_x, idx, weights, counts, handle, _ = buffer.dispatch(**dispatch_arguments(TRIAL.work, rank, x=x))
        check("recv_x", recv_x, dtype, expected)
        assert recv_x.shape == expected.shape and counts == TRIAL.received[rank].num_tokens_per_expert
        assert torch.equal(idx, TRIAL.received[rank].topk_idx)
        check("cached", buffer.dispatch(x, handle=handle)[0], dtype, expected)
        most = TRIAL.max_rows
        worst = buffer.dispatch(**dispatch_arguments(TRIAL.work, rank, x=x, num_worst_tokens=most))[0]
        check("worst", worst[: len(expected)], dtype, expected)
        if dtype.itemsize == 1:
            scales = torch.full((len(x), 2), float(rank))
            rows, recv_scales = buffer.dispatch((x, scales), handle=handle)[0]
            check("with scales", rows, dtype, expected)
            ends = record_of(handle).plan.rank_prefix[:, rank].contiguous()
            sources = torch.bucketize(torch.arange(len(rows)), ends, right=True)
            assert torch.equal(recv_scales, sources.float()[:, None].expand(-1, 2))
        TRIAL.check_combine(rank, TRIAL.combine(buffer, rank, handle))

    run_ranks(TRIAL.case.ranks, on_each_rank, seed=1)


@pytest.mark.once
@pytest.mark.parametrize("dtype", OTHERS, ids=str)
def test_other_types_are_named(dtype: torch.dtype) -> None:
    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, TRIAL.case, "peer")
        name = str(dtype).removeprefix("torch.")
        every = " or ".join(str(one).removeprefix("torch.") for one in (*TWO_BYTES, *ONE_BYTE))
        x = torch.zeros(len(TRIAL.work.x[buffer.rank]), 64, dtype=dtype)
        with pytest.raises(TypeError, match=rf"^x={name}\[.*: expected {every}\["):
            buffer.dispatch(**dispatch_arguments(TRIAL.work, buffer.rank, x=x))
        with pytest.raises(TypeError, match=rf"^x\[0\]={name}\[.*: expected float8_e4m3fn or .* or uint8\["):
            buffer.dispatch(**dispatch_arguments(TRIAL.work, buffer.rank, x=(x, torch.zeros(len(x), 1))))

    run_ranks(TRIAL.case.ranks, on_each_rank, seed=1)


@pytest.mark.once
@pytest.mark.parametrize("dtype", [one for one in (*ONE_BYTE, *TWO_BYTES, *OTHERS) if one != torch.bfloat16], ids=str)
def test_sums_of_other_types_are_refused(dtype: torch.dtype) -> None:
    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, TRIAL.case, "peer")
        results = buffer.dispatch(**dispatch_arguments(TRIAL.work, buffer.rank))
        x = torch.zeros(results[0].shape, dtype=dtype)
        name = str(dtype).removeprefix("torch.")
        with pytest.raises(TypeError, match=rf"^x={name}\[.*: expected bfloat16\["):
            buffer.combine(x, results[4])
        TRIAL.check_combine(buffer.rank, TRIAL.combine(buffer, buffer.rank, results[4]))

    run_ranks(TRIAL.case.ranks, on_each_rank, seed=1)


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize(
    ("mine", "others"),
    [
        (torch.bfloat16, torch.float16),
        (torch.float16, torch.int16),
        (torch.float8_e4m3fn, torch.float8_e5m2),
        (torch.int8, torch.uint8),
        (torch.bfloat16, torch.int8),
    ],
    ids=str,
)
def test_ranks_that_differ_are_all_told(mine: torch.dtype, others: torch.dtype, cached: bool) -> None:
    """Rows with the same number of bytes could be moved but would be misinterpreted."""

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, TRIAL.case, "peer")
        x = TRIAL.work.x[buffer.rank].view(mine if buffer.rank == 0 else others)
        arguments = dispatch_arguments(TRIAL.work, buffer.rank)
        if cached:
            arguments = {"handle": buffer.dispatch(**arguments)[4]}
            group.barrier()  # the failure that follows ends what any rank has not finished
        with pytest.raises(deep_ep.DeepEPError, match=r"does not match|ended because"):
            buffer.dispatch(**{**arguments, "x": x})

    run_ranks(TRIAL.case.ranks, on_each_rank, seed=1)
