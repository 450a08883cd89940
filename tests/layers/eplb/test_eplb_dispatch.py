"""A placement in use: physical experts in dispatch and combine, its counts, and the next plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deep_ep_py import eplb
from deep_ep_py.testing import run_ranks
from low_latency import Sizes, make_buffer

pytestmark = pytest.mark.once

RANKS, TOKENS, EXPERTS, PHYSICAL, TOPK, HIDDEN = 4, 24, 6, 12, 2, 128
SIZES = Sizes("eplb", RANKS, (TOKENS,) * RANKS, TOKENS, HIDDEN, TOPK, PHYSICAL)
POPULAR = torch.tensor([30.0, 2.0, 20.0, 2.0, 1.0, 1.0])
"""How often routers choose each expert. A plan for equal loads has experts 0 and 2 on the same ranks."""


def test_replicas_compute_what_their_experts_would() -> None:
    generator = torch.Generator().manual_seed(1)
    choices = [torch.multinomial(POPULAR.expand(TOKENS, -1), TOPK, generator=generator) for _ in range(RANKS)]
    chosen = torch.cat(choices).flatten().bincount(minlength=EXPERTS)

    def on_each_rank(group: Any) -> list[Any]:
        rank = group.rank()
        placement = eplb.plan(torch.ones(EXPERTS), num_physical_experts=PHYSICAL, num_ranks=RANKS)
        counts = torch.zeros(PHYSICAL // RANKS, dtype=torch.int32)
        x = torch.full((TOKENS, HIDDEN), float(rank + 1), dtype=torch.bfloat16)
        weights = torch.ones(TOKENS, TOPK)
        predicted = []
        with make_buffer(group, SIZES, "peer") as buffer:
            for _ in range(2):
                topk_idx = eplb.logical_to_physical(choices[rank], placement, rank=rank)
                packed, _, handle, _, _ = buffer.low_latency_dispatch(
                    x, topk_idx, TOKENS, PHYSICAL, cumulative_local_expert_recv_stats=counts.zero_(), use_fp8=False
                )
                # Each expert multiplies by a number of its own.
                held = placement.physical_to_logical_map.view(RANKS, -1)[rank]
                results = packed * (1 + held).view(-1, 1, 1).bfloat16()
                combined, _, _ = buffer.low_latency_combine(results, topk_idx, weights, handle)
                wanted = (1 + choices[rank]).sum(dim=1, keepdim=True) * (rank + 1)
                assert torch.equal(combined, wanted.expand(-1, HIDDEN).bfloat16())

                everyones = torch.cat(group.all_gather_object(counts.clone()))
                loads = eplb.physical_to_logical(everyones, placement)
                assert torch.equal(loads, chosen)
                predicted.append(eplb.rank_loads(loads, placement).max_over_mean.item())
                placement = eplb.plan(loads, num_physical_experts=PHYSICAL, num_ranks=RANKS)
        return [predicted, placement.physical_to_logical_map.tolist()]

    results = run_ranks(RANKS, on_each_rank, seed=1)
    assert all(result == results[0] for result in results)
    before, after = results[0][0]
    assert after < 1.2 and before > 1.5


def test_no_result_is_missing_without_a_lost_rank() -> None:
    """Every expert has a replica on another rank, which routers choose once the Buffer has recovered."""
    lost, generator = 2, torch.Generator().manual_seed(1)
    choices = torch.randint(0, EXPERTS, (RANKS, TOKENS, TOPK), generator=generator)
    placement = eplb.plan(torch.ones(EXPERTS), num_physical_experts=PHYSICAL, num_ranks=RANKS)
    assert placement.expert_count.tolist() == [[2] * EXPERTS]

    def on_each_rank(group: Any) -> None:
        rank, x = group.rank(), torch.full((TOKENS, HIDDEN), float(group.rank() + 1), dtype=torch.bfloat16)
        with make_buffer(group, SIZES, "peer") as buffer:
            group.barrier()
            if rank == lost:
                return
            buffer.recover([lost])
            left = placement.without(buffer.masked_ranks)
            held = left.physical_to_logical_map.view(RANKS, -1)[rank]
            topk_idx = eplb.logical_to_physical(choices[rank], left, rank=rank)
            packed, _, handle, _, _ = buffer.low_latency_dispatch(x, topk_idx, TOKENS, PHYSICAL, use_fp8=False)
            results = packed * (1 + held).view(-1, 1, 1).bfloat16()
            combined, _, _ = buffer.low_latency_combine(results, topk_idx, torch.ones(TOKENS, TOPK), handle)
            wanted = (1 + choices[rank]).sum(dim=1, keepdim=True) * (rank + 1)
            assert torch.equal(combined, wanted.expand(-1, HIDDEN).bfloat16())

    run_ranks(RANKS, on_each_rank, seed=1)
