"""A plan from one batch's statistics, held against the next batches of the benchmark's skewed routing."""

from __future__ import annotations

import pytest
import torch

from deep_ep_py import eplb
from deep_ep_py.tools.bench.routing import route, tokens_in_rank

pytestmark = pytest.mark.once

RANKS, NODES, EXPERTS, PHYSICAL, TOPK, TOKENS = 8, 4, 256, 288, 8, 4096


def imbalance(ids: list[torch.Tensor], experts: int) -> float:
    """Return the most rows that a rank receives, over the mean."""
    rows = torch.stack([tokens_in_rank(each, experts, RANKS).sum(0) for each in ids]).sum(0).double()
    return float(rows.max() / rows.mean())


def hottest_nic(ids: list[torch.Tensor], experts: int) -> int:
    """Return the most rows that a NIC receives, if a token crosses once to each node, to the sender's local index."""
    received = torch.zeros(RANKS, dtype=torch.int64)
    per_node = RANKS // NODES
    for rank, each in enumerate(ids):
        to_node = tokens_in_rank(each, experts, RANKS).unflatten(1, (NODES, per_node)).any(2).sum(0)
        to_node[rank // per_node] = 0
        received[rank % per_node :: per_node] += to_node
    return int(received.max())


def test_ranks_are_even() -> None:
    def batch(step: int) -> list[torch.Tensor]:
        return [route("skewed", TOKENS, TOPK, EXPERTS, 0, rank, step)[0] for rank in range(RANKS)]

    loads = sum(torch.bincount(ids.flatten(), minlength=EXPERTS) for ids in batch(0))
    plan = eplb.plan(loads, num_physical_experts=PHYSICAL, num_ranks=RANKS, num_nodes=NODES)
    for step in (1, 2, 3):
        before = batch(step)
        after = [eplb.logical_to_physical(ids, plan, rank=rank) for rank, ids in enumerate(before)]
        assert imbalance(before, EXPERTS) > 1.4 and imbalance(after, PHYSICAL) < 1.1
        assert hottest_nic(after, PHYSICAL) < hottest_nic(before, EXPERTS)
