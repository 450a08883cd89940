"""`enable_shrink`: ranks that do not answer are masked, and the others go on with what is theirs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import deep_ep_py as deep_ep
from deep_ep_py.testing import sleep
from harness import barrier, under_schedules
from low_latency import BF16, CASTS, Sizes, Work, check_dispatch, combine, dispatch, make_buffer, round_trip

SIZES = Sizes("masks", 4, (9, 40, 3, 33), 40, 128, 4, 8)
WORK = Work.of(SIZES)
MIXED = ("peer", "weak", "ibgda", "mixed")
TIMEOUT, GONE = 30.0, 2
LIVING = [rank for rank in range(SIZES.ranks) if rank != GONE]


def make(group: Any, fabric: str, **options: Any) -> deep_ep.Buffer:
    return make_buffer(group, SIZES, fabric, enable_shrink=True, **{"timeout": TIMEOUT, **options})


def go_on(buffer: deep_ep.Buffer, *gone: int, rounds: int = 3) -> None:
    """Choices of experts that are gone are still named: nothing goes there, and nothing comes."""
    rest, rank = WORK.without(*gone), buffer.rank
    named = replace(rest, topk_idx=[ids[: len(x)] for ids, x in zip(WORK.topk_idx, rest.x, strict=True)])
    for turn in range(rounds):
        cast, hooks = (BF16, CASTS["fp8"])[turn % 2], turn % 3 == 2
        results = dispatch(buffer, named, cast, return_recv_hook=hooks)
        if hooks:
            results[4]()
        check_dispatch(rest, rank, cast, results)
        combined, _, hook = combine(buffer, named, results[2], rest.results[rank], return_recv_hook=hooks)
        if hooks:
            hook()
        assert torch.equal(combined, rest.combined[rank])


def status(buffer: deep_ep.Buffer) -> list[int]:
    tensor = torch.full((SIZES.ranks,), 7, dtype=torch.int32)
    buffer.low_latency_query_mask_buffer(tensor)
    return tensor.nonzero().flatten().tolist()


@pytest.mark.parametrize("fabric", MIXED)
def test_nothing_changes_where_all_answer(fabric: str) -> None:
    def on_each_rank(group: Any) -> None:
        with make(group, fabric) as buffer:
            for hooks in (False, True):
                round_trip(buffer, WORK, hooks=hooks)
            buffer.clean_low_latency_buffer(SIZES.most_tokens, SIZES.hidden, SIZES.experts)
            assert status(buffer) == buffer.masked_ranks == []

    under_schedules(SIZES.ranks, on_each_rank)


@pytest.mark.parametrize("fabric", MIXED)
@pytest.mark.parametrize("where", ["dispatch", "combine", "hook", "clean"])
def test_a_rank_that_does_not_come(fabric: str, where: str) -> None:
    """It sleeps for long, and finds then that it is masked."""

    def on_each_rank(group: Any) -> None:
        buffer = make(group, fabric)
        round_trip(buffer, WORK)
        barrier(group)
        late = buffer.rank == GONE
        begun = dispatch(buffer, WORK, return_recv_hook=where == "hook") if where in ("combine", "hook") else None
        if late:
            sleep(6 * TIMEOUT)
            with pytest.raises(deep_ep.DeepEPError, match=rf"rank [013] has masked rank {GONE}"):
                if where == "hook":
                    begun[4]()
                round_trip(buffer, WORK)
            with pytest.raises(deep_ep.DeepEPError, match="broken"):
                dispatch(buffer, WORK)
            barrier(group)
            buffer.destroy()
            return
        if where == "clean":
            buffer.clean_low_latency_buffer(SIZES.most_tokens, SIZES.hidden, SIZES.experts)
        elif begun is None:
            go_on(buffer, GONE, rounds=1)
        elif where == "hook":
            begun[4]()  # the sleeping rank has sent for this one
            check_dispatch(WORK, buffer.rank, BF16, begun)
            go_on(buffer, GONE, rounds=1)
        else:
            combined = combine(buffer, WORK, begun[2])[0]
            assert torch.equal(combined, WORK.sums_without(GONE)[buffer.rank])
        assert status(buffer) == buffer.masked_ranks == [GONE]
        go_on(buffer, GONE)
        barrier(group)
        buffer.destroy()

    under_schedules(SIZES.ranks, on_each_rank)
