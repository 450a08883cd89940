"""The values that LogFMT turns results into, in plain torch; shares no code with the library."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from low_latency import Work, combined_of

GROUP = 128
CODES = 511
MAX_OCTAVES = 32


def rounded(values: Tensor) -> Tensor:
    """Return bfloat16 values as LogFMT delivers them, in fp32.

    Magnitudes are handled as their bits, as integers; everything else is exact in int64 and float64.
    """
    groups = values.contiguous().view(torch.int16).long().view(-1, GROUP)
    magnitude, negative = groups & 0x7FFF, (groups & 0x8000) != 0
    most = magnitude.amax(dim=1, keepdim=True)
    least = torch.where(magnitude == 0, 0x3F80, magnitude).amin(dim=1, keepdim=True)
    least = torch.maximum(least, most - 128 * MAX_OCTAVES)
    span = (most - least).clamp(min=CODES - 1)
    rate = ((CODES - 1) << 20) // span
    codes = 1 + (((magnitude - least) * rate + (1 << 19)) >> 20)
    step = ((span << 16) + (CODES - 1) // 2) // (CODES - 1)
    bits = (least << 16) + (codes - 1) * step
    bits = torch.where(magnitude < least, 0, bits).to(torch.int32)
    decoded = torch.where(negative, -bits.view(torch.float32), bits.view(torch.float32))
    kept = most >= 0x3F80
    return torch.where(kept, values.float().view(-1, GROUP), decoded).view(values.shape)


def ideal(values: Tensor) -> Tensor:
    """Return the values that codes of the exact logarithm, rounded to nearest, give in cast groups, in float64."""
    groups = values.double().view(-1, GROUP)
    magnitude = groups.abs()
    most = magnitude.amax(dim=1, keepdim=True).log2()
    least = torch.where(magnitude == 0, 1.0, magnitude).amin(dim=1, keepdim=True).log2()
    least = torch.maximum(least, most - MAX_OCTAVES)
    step = ((most - least) / (CODES - 1)).clamp(min=1e-30)
    codes = ((magnitude.log2() - least) / step).round().clamp(min=0)
    decoded = torch.exp2(least + codes * step)
    decoded = torch.where(magnitude.log2() < least, 0.0, decoded)
    return torch.copysign(decoded, groups).view(values.shape)


def spread(work: Work, seed: int = 1) -> Work:
    """Return the same workload with results of all kinds: groups that are cast, groups that are not, wide ones,
    zeros."""
    random = torch.Generator().manual_seed(seed)
    results = []
    for own in work.results:
        groups = own.float().view(*own.shape[:2], -1, GROUP)
        kind = torch.randint(0, 5, groups.shape[:3], generator=random)[..., None]
        exponents = 10 * torch.rand(groups.shape, generator=random)
        small, wide = groups / 64, groups / 64 * torch.exp2(-exponents)
        sparse = torch.where(torch.rand(groups.shape, generator=random) < 0.5, 0.0, small)
        # Kind 0 stays unchanged: mostly larger than 1 somewhere.
        made = groups
        for number, other in enumerate((small, wide, sparse, torch.full_like(groups, 0.25)), 1):
            made = torch.where(kind == number, other.where(groups.isfinite(), groups), made)
        results.append(made.view(own.shape).to(torch.bfloat16))
    return cast(replace(work, results=results))


def small(work: Work) -> Work:
    """Return the same workload with results of which every group is cast."""
    return cast(replace(work, results=[own / 64 for own in work.results]))


def cast(work: Work) -> Work:
    """Return the workload with the sums expected if its results travel as LogFMT."""
    decoded = [rounded(own.nan_to_num()) for own in work.results]
    ranks = range(work.sizes.ranks)
    return replace(work, combined=[combined_of(replace(work, results=decoded), rank) for rank in ranks])
