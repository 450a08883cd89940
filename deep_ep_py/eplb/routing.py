"""Chooses a replica for each choice of a router."""

from __future__ import annotations

import torch
from torch import Tensor

from deep_ep_py.base import arguments
from deep_ep_py.eplb.placement import Placement, checked_layer, checked_placement


def logical_to_physical(topk_idx: Tensor, placement: Placement, *, rank: int, layer: int | None = None) -> Tensor:
    """Replace the logical experts that a router has chosen by physical ones, whose ids dispatch takes.

    Replicas take turns: token t of rank r goes to the replica with index (t + r) modulo the number of replicas, in the
    order of `Placement.logical_to_physical_map`. The choice depends on nothing else, so it is the same on every run. If
    every token chooses an expert, the rows of its replicas differ by at most one row per rank; adding the rank evens
    that out too, when ranks have few tokens. If tokens choose an expert at random, its replicas get equal shares on
    average. They do not if its choice depends on the parity of t, or on the remainder for another number of replicas.

    On a GPU the host waits for nothing, so that a graph can capture the call, with a placement that is on the GPU
    already. A new placement requires a new capture. All operations are torch's, so `torch.compile` can fuse them.

    Parameters
    ----------
    topk_idx : torch.Tensor
        int64 or int32 [tokens, top-k], contiguous, on the device of the placement: logical experts, -1 for none.
    placement : Placement
        The placement in use.
    rank : int
        The rank whose tokens these are.
    layer : int, optional
        The layer whose router has chosen; required if the placement has several.

    Returns
    -------
    torch.Tensor
        [tokens, top-k] of topk_idx's dtype: physical experts; -1 stays -1. Ids on a GPU are not checked, which would
        have to wait for the GPU. There other negative ids stay as they are, and ids that are too high become the number
        of physical experts: neither is a valid id, and the dispatch reports it.

    Raises
    ------
    TypeError, ValueError
        An argument is invalid; the message names it.
    """
    checked_placement(placement)
    arguments.integer("rank", rank, 0, placement.num_ranks - 1)
    layer = checked_layer(placement, layer)
    experts, device = placement.num_logical_experts, placement.device
    arguments.shaped("topk_idx", topk_idx, torch.int64, (None, None), device, torch.int32)
    if device.type == "cpu" and not torch.compiler.is_compiling():
        arguments.topk_idx(topk_idx, experts, device)
    expert = topk_idx.clamp(0, experts - 1).long()
    turn = torch.arange(rank, rank + topk_idx.shape[0], device=device).unsqueeze(1)
    replica = turn % placement.expert_count[layer][expert]
    physical = placement.logical_to_physical_map[layer][expert, replica].to(topk_idx.dtype)
    physical = physical.masked_fill(topk_idx >= experts, placement.num_physical_experts)
    return torch.where(topk_idx < 0, topk_idx, physical)
