"""Stand-in for `deep_ep.utils.math`: casts to FP8 and back, and helpers of tests of dispatch and combine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from deep_ep_py.device.rowwise import fp8

_GROUP = 128
"""Elements that share a scale."""


def ceil_div(x: int, y: int) -> int:
    """Return x / y, rounded up."""
    return -(-x // y)


def align(x: int, y: int) -> int:
    """Return the least multiple of `y` that is at least `x`."""
    return ceil_div(x, y) * y


def safe_div(a: float, b: float) -> float:
    """Return a / b, but 0 for 0 / 0; anything else divided by 0 raises ZeroDivisionError."""
    return 0 if a == b == 0 else a / b


def calc_diff(x: torch.Tensor, y: torch.Tensor) -> float:
    """Return how far apart two tensors are: 1 minus their similarity, 0 if they are equal.

    Computed in float64 as 1 - 2 sum(xy) / sum(xx + yy), with 1 added to every element so that zeros count.
    """
    a, b = x.double() + 1, y.double() + 1
    return float(1 - 2 * (a * b).sum() / (a.square() + b.square()).sum())


def _filled_up(x: torch.Tensor, multiple: int) -> torch.Tensor:
    """Return rows padded with zeros to a length that is a multiple of `multiple`."""
    if x.dim() != 2:
        raise ValueError(f"x of shape {list(x.shape)}: expected [rows, columns]")
    return F.pad(x, (0, -x.shape[1] % multiple)).contiguous()


def per_token_cast_to_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cast rows to FP8 with one scale per 128 elements, the format that FP8 dispatch takes.

    Parameters
    ----------
    x : torch.Tensor
        bfloat16 or float32 [rows, columns].

    Returns
    -------
    x_fp8 : torch.Tensor
        float8_e4m3fn [rows, columns].
    scales : torch.Tensor
        float32 [rows, ceil(columns / 128)]: the largest magnitude of each group, at least 1e-4, divided by 448.
    """
    cast, scales = fp8.per_token_cast_to_fp8(_filled_up(x, _GROUP))
    return cast[:, : x.shape[1]].contiguous(), scales


def per_token_cast_back(x_fp8: torch.Tensor, x_scales: torch.Tensor) -> torch.Tensor:
    """Undo `per_token_cast_to_fp8`.

    Parameters
    ----------
    x_fp8 : torch.Tensor
        float8_e4m3fn [rows, columns].
    x_scales : torch.Tensor
        float32 [rows, groups], with any strides; or int32 [rows, groups / 4], four exponents (UE8M0) per element.
        Scales of another shape are taken in order, row after row, as in DeepEP.

    Returns
    -------
    torch.Tensor
        bfloat16 [rows, columns].
    """
    packed = fp8.PACKED if x_scales.dtype == torch.int32 else 1
    filled = _filled_up(x_fp8.view(torch.uint8), _GROUP * packed).view(torch.float8_e4m3fn)
    scales = x_scales.reshape(filled.shape[0], -1) if len(filled) else x_scales
    return fp8.per_token_cast_back(filled, scales)[:, : x_fp8.shape[1]].contiguous()


def inplace_unique(x: torch.Tensor, num_slots: int) -> None:
    """Reduce each row to its distinct ids, the largest first, followed by -1.

    Parameters
    ----------
    x : torch.Tensor
        int64 [rows, ids], changed in place: ids below `num_slots`; negative ones do not count.
    num_slots : int
        Number of possible ids.
    """
    ids = torch.arange(num_slots, dtype=x.dtype, device=x.device)
    # One extra slot, for ids that do not count.
    there = torch.zeros((x.shape[0], num_slots + 1), dtype=torch.bool, device=x.device)
    there.scatter_(1, x.masked_fill(x < 0, num_slots), True)
    kept = min(num_slots, x.shape[1])
    x[:, :kept] = torch.where(there[:, :num_slots], ids, -1).sort(dim=1, descending=True).values[:, :kept]
    x[:, kept:] = -1


def create_grouped_scores(scores: torch.Tensor, group_idx: torch.Tensor, num_groups: int) -> torch.Tensor:
    """Return the scores, with 0 for experts in groups that a token has not chosen.

    Parameters
    ----------
    scores : torch.Tensor
        [tokens, experts].
    group_idx : torch.Tensor
        int64 [tokens, chosen]: the chosen groups; a group is a run of consecutive experts.
    num_groups : int
        Number of groups.

    Returns
    -------
    torch.Tensor
        [tokens, experts].
    """
    chosen = torch.zeros((scores.shape[0], num_groups), dtype=torch.bool, device=scores.device)
    chosen.scatter_(1, group_idx, True)
    return scores * chosen.repeat_interleave(scores.shape[1] // num_groups, dim=1)


def hash_tensor(t: torch.Tensor) -> int:
    """Return the sum of a contiguous tensor's bytes, read as int32."""
    return int(t.view(torch.int32).sum())


def hash_tensors(*tensors: Any) -> int:
    """Return the exclusive or of the hashes of all tensors, including those in tuples and lists; skip other values."""
    value = 0
    for leaf in _leaves(tensors):
        if isinstance(leaf, torch.Tensor):
            value ^= hash_tensor(leaf)
    return value


def count_bytes(*tensors: Any) -> int:
    """Return how many bytes the elements of all tensors take, including those in tuples and lists; None takes none."""
    return sum(leaf.numel() * leaf.element_size() for leaf in _leaves(tensors))


def _leaves(nested: tuple[Any, ...] | list[Any]) -> Iterator[Any]:
    """Yield what tuples and lists in each other contain, except None."""
    for one in nested:
        if isinstance(one, (tuple, list)):
            yield from _leaves(one)
        elif one is not None:
            yield one
