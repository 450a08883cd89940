"""Weights that move between ranks, and gradients of replicas, on a GPU that all ranks share."""

from __future__ import annotations

from typing import Any

import torch

from cases import AMPLE, Case
from deep_ep_py import eplb
from deep_ep_py.testing import run_ranks
from harness import make_buffer

RANKS, EXPERTS, PHYSICAL = 4, 8, 12
CASE = Case("eplb", RANKS, (0,) * RANKS, num_nvl_bytes=AMPLE)


def placement(seed: int) -> eplb.Placement:
    loads = torch.rand(EXPERTS, generator=torch.Generator().manual_seed(seed)) ** 4
    return eplb.plan(loads, num_physical_experts=PHYSICAL, num_ranks=RANKS)


def make_warm(group: Any, row_bytes: int) -> Any:
    buffer = make_buffer(group, CASE, "peer", device="cuda", timeout=20.0)
    buffer.warmup(row_bytes // 2, 1)
    return buffer


def test_moves() -> None:
    """From one placement to the next, twice, into tensors of new places."""
    placements = [placement(seed) for seed in (0, 1, 2)]
    random = torch.Generator().manual_seed(1)
    everything = [torch.randn(EXPERTS, 60, 77, generator=random), torch.randn(EXPERTS, 3, generator=random).bfloat16()]

    def on_each_rank(group: Any) -> None:
        with make_warm(group, 4096) as buffer:
            rank = buffer.rank
            held = [one.physical_to_logical_map.view(RANKS, -1)[rank] for one in placements]
            tensors = [given[held[0]].to(buffer.device) for given in everything]
            for number, (old, new) in enumerate(zip(placements, placements[1:], strict=False), 1):
                tensors = eplb.Move(buffer, tensors, old, new).finish()
                for moved, given in zip(tensors, everything, strict=True):
                    assert torch.equal(moved.cpu(), given[held[number]])

    run_ranks(RANKS, on_each_rank, device="cuda")


def test_sums() -> None:
    """All replicas of an expert get the sum of their gradients, in one order, with the same bits."""
    chosen = placement(3)
    held = chosen.physical_to_logical_map.view(RANKS, -1)
    random = torch.Generator().manual_seed(2)
    gradients = torch.randn(RANKS, PHYSICAL // RANKS, 300, generator=random).bfloat16()
    sums: dict[int, torch.Tensor] = {}
    for slot in range(held.shape[1]):
        for rank in range(RANKS):
            expert = int(held[rank, slot])
            sums[expert] = sums.get(expert, torch.zeros(300)) + gradients[rank, slot].float()

    def on_each_rank(group: Any) -> None:
        with make_warm(group, 608) as buffer:
            mine = gradients[buffer.rank].to(buffer.device, copy=True)
            eplb.ReplicaSums(buffer, chosen).sum_([mine])
            for slot, expert in enumerate(held[buffer.rank].tolist()):
                assert torch.equal(mine[slot].cpu(), sums[expert].bfloat16())

    run_ranks(RANKS, on_each_rank, device="cuda")
