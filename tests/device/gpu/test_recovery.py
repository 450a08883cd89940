"""Ranks that go on after a failure, on a GPU that they share: `recover`, and `enable_shrink`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import deep_ep_py as deep_ep
from cases import BY_NAME
from deep_ep_py.testing import run_ranks
from gpu_ranks import make_warm
from harness import Trial, dispatch_arguments, left_out
from low_latency import BF16, CASTS, Sizes, Work, check_combine, check_dispatch, combine, dispatch, round_trip
from low_latency_gpu import warm_buffer

TRIAL = Trial.of(BY_NAME["uniform"])
LOST = 2
REST = left_out(TRIAL, [LOST])
SIZES = Sizes("masks", 4, (9, 40, 3, 33), 40, 128, 4, 8)
SECONDS = 2.0  # of a wait for a rank that does not come


def go_on(buffer: deep_ep.Buffer, wanted: Trial) -> None:
    """Dispatch and combine, checked after a check of the Buffer."""
    rank, device = buffer.rank, buffer.device
    given = {name: value.to(device) for name, value in dispatch_arguments(TRIAL.work, rank).items()}
    for _ in range(3):
        results = buffer.dispatch(**given)
        x, weights = wanted.expert.x[rank].to(device), wanted.expert.topk_weights[rank].to(device)
        combined = buffer.combine(x, results[4], topk_weights=weights)
        torch.cuda.current_stream().synchronize()
        buffer.check()
        wanted.check_dispatch(rank, results)
        wanted.check_combine(rank, combined)


def test_all_ranks_go_on() -> None:
    """One does not come, so that the others' kernels and hosts wait for it in vain; then all recover."""

    def on_each_rank(group: Any) -> None:
        buffer = make_warm(group, TRIAL.case, timeout=SECONDS)
        go_on(buffer, TRIAL)
        if buffer.rank != LOST:
            with pytest.raises(deep_ep.DeepEPError, match=f"rank {LOST}"):
                go_on(buffer, TRIAL)
        group.barrier()
        buffer.recover()
        assert buffer.masked_ranks == []
        go_on(buffer, TRIAL)
        group.barrier()
        buffer.destroy()

    run_ranks(TRIAL.case.ranks, on_each_rank, device="cuda")


def test_a_rank_is_left_out() -> None:
    """Its Buffer has been destroyed, as if its process had ended; the others recover without it."""

    def on_each_rank(group: Any) -> None:
        buffer = make_warm(group, TRIAL.case, timeout=2 * SECONDS)
        go_on(buffer, TRIAL)
        group.barrier()
        if buffer.rank == LOST:
            buffer.destroy()
        else:
            with pytest.raises(deep_ep.DeepEPError, match=f"rank {LOST}"):
                go_on(buffer, TRIAL)
            assert buffer.lost_ranks() == [LOST]
            buffer.recover([LOST])
            assert buffer.masked_ranks == [LOST]
            go_on(buffer, REST)
        group.barrier()

    run_ranks(TRIAL.case.ranks, on_each_rank, device="cuda")


def test_low_latency_calls_without_a_masked_rank() -> None:
    """A rank masks another; the rest go on at once, with BF16 and FP8 rows, and with hooks."""
    work = Work.of(SIZES)
    rest = work.without(LOST)
    named = replace(rest, topk_idx=[ids[: len(x)] for ids, x in zip(work.topk_idx, rest.x, strict=True)])

    def on_each_rank(group: Any) -> None:
        with warm_buffer(group, SIZES, enable_shrink=True) as buffer:
            round_trip(buffer, work)
            group.barrier()
            if buffer.rank == 0:
                buffer.low_latency_update_mask_buffer(LOST, True)
            group.barrier()
            for cast, hooks in ((BF16, False), (CASTS["fp8"], False), (BF16, True)):
                if buffer.rank == LOST:
                    continue
                results = dispatch(buffer, named, cast, return_recv_hook=hooks)
                if hooks:
                    results[4]()
                check_dispatch(rest, buffer.rank, cast, results)
                combined, _, hook = combine(buffer, named, results[2], return_recv_hook=hooks)
                if hooks:
                    hook()
                check_combine(rest, buffer.rank, combined)
            if buffer.rank != LOST:
                assert buffer.masked_ranks == [LOST]

    run_ranks(SIZES.ranks, on_each_rank, device="cuda")
