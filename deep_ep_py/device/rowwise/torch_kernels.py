"""The layer's kernels in plain torch: the reference, and the fallback without Triton."""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 128
FP8_MAX = 448.0
SMALLEST_AMAX = 1e-4


def gather_rows(x: Tensor, slots: Tensor, topk: int, weights: Tensor | None) -> Tensor:
    """Return row `slot // topk` of x for each slot, times weight `slot`: [slots, hidden] of x's dtype."""
    rows = x[slots // topk]
    if weights is None:
        return rows
    return (rows.float() * weights.flatten()[slots].unsqueeze(1)).to(x.dtype)


def sum_rows(x: Tensor, position: Tensor, weights: Tensor | None) -> Tensor:
    """Return, for each row of `position`, the weighted sum of the rows of x in it, in fp32 from left to right."""
    total = torch.zeros((position.shape[0], x.shape[1]), dtype=torch.float32, device=x.device)
    for choice in range(position.shape[1]):
        here = (position[:, choice] >= 0).nonzero().squeeze(1)
        rows = x[position[here, choice]].float()
        if weights is not None:
            rows = rows * weights[here, choice].unsqueeze(1)
        total[here] += rows
    return total.to(x.dtype)


def dot_rows(a: Tensor, b: Tensor, position: Tensor) -> Tensor:
    """Return dot products of row i of a with row `position[i, k]` of b, in float32; 0 where `position` is -1."""
    products = torch.zeros(position.shape, dtype=torch.float32, device=a.device)
    for choice in range(position.shape[1]):
        here = (position[:, choice] >= 0).nonzero().squeeze(1)
        products[here, choice] = (a[here].float() * b[position[here, choice]].float()).sum(dim=1)
    return products


def cast_to_fp8(x: Tensor, round_scale: bool) -> tuple[Tensor, Tensor]:
    """Return e4m3 rows and a float32 scale for every 128 elements, with `round_scale` a power of two."""
    groups = x.float().view(x.shape[0], x.shape[1] // GROUP, GROUP)
    amax = groups.abs().amax(dim=2, keepdim=True).clamp(min=SMALLEST_AMAX)
    scale = amax / FP8_MAX
    if round_scale:
        # Round up to a power of two: keep the exponent, plus one if the mantissa is not zero.
        scale = ((scale.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)
        quotient = groups * (1 / scale)
    else:
        quotient = groups * (FP8_MAX / amax)
    return quotient.to(torch.float8_e4m3fn).view(x.shape), scale.squeeze(2)


def cast_back(x: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return e4m3 rows times their float32 scales, in `dtype`."""
    groups = x.float().view(x.shape[0], x.shape[1] // GROUP, GROUP) * scales.unsqueeze(2)
    return groups.to(dtype).view(x.shape)
