"""The results that a layer of experts must return for given routes, in plain torch.

It shares no code with the library's layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deep_ep_py import moe, ops
from low_latency import BF16, Cast, Sizes, Work

INTERMEDIATE, SEED = 24, 3


def routed(work: Work, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return a rank's tokens, expert ids and weights."""
    return work.x[rank], work.topk_idx[rank], work.weights[rank]


def own_experts(sizes: Sizes, rank: int) -> moe.Experts:
    return moe.Experts(rank * sizes.local, sizes.local, sizes.hidden, INTERMEDIATE, SEED)


def make_layer(buffer: Any, sizes: Sizes, cast: Cast = BF16, zero_copy: bool = False) -> moe.DecodeLayer:
    """Make the calling rank's part of a layer."""
    experts = moe.PackedExperts(own_experts(sizes, buffer.rank))
    group = ops.register(buffer, f"decode on rank {buffer.rank}")
    return moe.DecodeLayer(experts, sizes.experts, sizes.max_tokens, group, **cast.options, zero_copy=zero_copy)


def dense(work: Work, rank: int, cast: Cast = BF16) -> tuple[Tensor, Tensor]:
    """Return the layer's results for a rank's tokens, and the sums of the magnitudes they are summed from, as
    float64."""
    everything = moe.Experts(0, work.sizes.experts, work.sizes.hidden, INTERMEDIATE, SEED)
    gate, up = everything.gate_and_up.detach().double().chunk(2, dim=1)
    down = everything.down.detach().double()
    x, ids, weights = routed(work, rank)
    rows = x.double()
    if cast.use_fp8 and len(x):
        values, scales = cast.of(x)
        factors = torch.exp2(scales.double() - 127) if cast.use_ue8m0 else scales.double()
        rows = values.double() * factors.repeat_interleave(128, dim=1)
    total, magnitude = torch.zeros_like(rows), torch.zeros_like(rows)
    for token, choice in (ids >= 0).nonzero().tolist():
        expert = int(ids[token, choice])
        opened = gate[expert] @ rows[token]
        result = down[expert] @ (opened * opened.sigmoid() * (up[expert] @ rows[token]))
        total[token] += weights[token, choice].double() * result
        magnitude[token] += weights[token, choice].double() * result.abs()
    return total, magnitude


def check_close(got: Tensor, wanted: Tensor, magnitude: Tensor, share: float) -> None:
    """Compare, allowing an error of `share` times the sum of magnitudes."""
    assert got.shape == wanted.shape
    excess = (got.double() - wanted).abs() - share * magnitude
    assert not excess.isnan().any() and (excess <= 1e-6).all(), float(excess.max())
