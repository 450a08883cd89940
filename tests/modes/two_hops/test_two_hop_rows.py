"""Rows of other types, with scales and 32-bit ids, and outputs of a size known in advance, in two-hop mode."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import deep_ep_py as deep_ep
import oracle
from cases import BY_NAME, Case
from deep_ep_py.testing import run_ranks
from fp8 import KINDS, Fp8Trial
from harness import Trial, cramped, dispatch_arguments, make_buffer, under_schedules

FABRICS = ("ibgda", "proxy")
TYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8, torch.float16, torch.int16)

fabrics = pytest.mark.parametrize("fabric", FABRICS)
arenas = pytest.mark.parametrize("arena_bytes", [None, 0], ids=["arena", "local_chunks"])


@fabrics
@pytest.mark.parametrize("kind", KINDS)
def test_fp8_with_scales(kind: str, fabric: str) -> None:
    """Strides of every kind and ids of both sizes; every second kind in chunks of a few rows and in local chunks."""
    ids = (torch.int32, torch.int64)[KINDS.index(kind) % 2]
    case = Case("fp8", 4, (9, 0, 17, 6), topk=3, experts=8, ranks_per_node=2)
    if KINDS.index(kind) % 3:
        # Chunks of FP8 rows with scales are slightly longer than those of the case.
        case = replace(cramped(case, fabric, 1.6), arena_bytes=0)
    trial = Fp8Trial.of(case, kind, ids)

    def on_each_rank(group: Any) -> None:
        trial.round_trip(make_buffer(group, case, fabric))

    under_schedules(case.ranks, on_each_rank, count=3)


@fabrics
def test_rows_of_other_types_arrive_as_they_are(fabric: str) -> None:
    trial = Trial.of(BY_NAME["2x3_holes"])

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, trial.case, fabric)
        rank = buffer.rank
        expected = trial.received[rank].x
        for dtype in TYPES:
            x = trial.work.x[rank].view(dtype)
            recv_x, *_, handle, _ = buffer.dispatch(**dispatch_arguments(trial.work, rank, x=x))
            again = buffer.dispatch(x, handle=handle)[0]
            for got in (recv_x, again):
                assert got.dtype == dtype and torch.equal(got.view(torch.uint8), expected.view(torch.uint8)), dtype
        trial.check_combine(rank, trial.combine(buffer, rank, handle))

    run_ranks(trial.case.ranks, on_each_rank, seed=1)


@arenas
@fabrics
@pytest.mark.parametrize("name", ["2x2_uneven", "3x2_uniform", "2x2_nothing_routed"])
def test_worst_tokens(name: str, fabric: str, arena_bytes: int | None) -> None:
    trial = Trial.of(replace(BY_NAME[name], arena_bytes=arena_bytes))

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, trial.case, fabric)
        rank = buffer.rank
        used = len(trial.received[rank].x)
        for extra in (0, 5):
            rows = max(trial.max_rows + extra, 1)
            arguments = dispatch_arguments(trial.work, rank, num_worst_tokens=rows, config=deep_ep.Config(num_sms=2))
            results = buffer.dispatch(**arguments)
            trial.check_worst(rank, results, rows)
            handle = results[4]
            trial.check_combine(rank, buffer.combine(handle=handle, **trial.padded(rank, rows)))
            again = buffer.dispatch(trial.work.x[rank], handle=handle)[0]
            assert oracle.same_bits(again[:used], trial.received[rank].x)

    under_schedules(trial.case.ranks, on_each_rank)


@fabrics
def test_too_few_rows_fail_on_every_rank(fabric: str) -> None:
    """Before a row is sent, although a rank does not know what others receive."""
    trial = Trial.of(BY_NAME["2x2_to_one_rank"])
    rows = trial.max_rows - 1

    def on_each_rank(group: Any) -> str:
        buffer = make_buffer(group, trial.case, fabric)
        with pytest.raises(deep_ep.DeepEPError) as info:
            buffer.dispatch(**dispatch_arguments(trial.work, buffer.rank, num_worst_tokens=rows))
        return str(info.value)

    for said in under_schedules(trial.case.ranks, on_each_rank):
        assert any(f"num_worst_tokens={rows}: expected at least {rows + 1}" in message for message in said), said
        for rank, message in enumerate(said):
            told = f"rank {rank}: dispatch ended because rank "
            assert "expected at least" in message or message.startswith(told), message


@fabrics
def test_types_that_differ_are_told(fabric: str) -> None:
    """Also to ranks that exchange no message with the deviating rank."""
    trial = Trial.of(BY_NAME["3x2_uniform"])

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, trial.case, fabric)
        x = trial.work.x[buffer.rank].view(torch.float16 if buffer.rank == 5 else torch.bfloat16)
        with pytest.raises(deep_ep.DeepEPError, match=r"does not match|ended because"):
            buffer.dispatch(**dispatch_arguments(trial.work, buffer.rank, x=x))

    run_ranks(trial.case.ranks, on_each_rank, seed=1)
