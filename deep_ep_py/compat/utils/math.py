"""What serves as `deep_ep.utils.math`: casts to FP8 and back, and what tests of dispatch and combine compute."""

from __future__ import annotations

import torch
import torch.nn.functional as F

_GROUP = 128
"""Elements that share a scale."""


def calc_diff(x: torch.Tensor, y: torch.Tensor) -> float:
    """Return how far two tensors are apart: 1 less their similarity, 0 where they are equal.

    In float64, with 1 added to every element, so that zeros count: 1 - 2 sum(xy) / sum(xx + yy).
    """
    a, b = x.double() + 1, y.double() + 1
    return float(1 - 2 * (a * b).sum() / (a.square() + b.square()).sum())


def _filled_up(x: torch.Tensor, multiple: int) -> torch.Tensor:
    """Return rows with zeros behind them, so that their length is a multiple."""
    if x.dim() != 2:
        raise ValueError(f"x of shape {list(x.shape)}: expected [rows, columns]")
    return F.pad(x, (0, -x.shape[1] % multiple)).contiguous()


def per_token_cast_to_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cast rows to FP8 with a scale for each 128 elements, as FP8 dispatch takes them.

    Parameters
    ----------
    x : torch.Tensor
        bfloat16 or float32 [rows, columns].

    Returns
    -------
    x_fp8 : torch.Tensor
        float8_e4m3fn [rows, columns].
    scales : torch.Tensor
        float32 [rows, columns / 128, rounded up]: the largest magnitude of each group, at least 1e-4, over 448.
    """
    from deep_ep_py.moe import fp8  # it imports the whole MoE layer, which not every user of `deep_ep` needs

    cast, scales = fp8.per_token_cast_to_fp8(_filled_up(x, _GROUP))
    return cast[:, : x.shape[1]].contiguous(), scales


def per_token_cast_back(x_fp8: torch.Tensor, x_scales: torch.Tensor) -> torch.Tensor:
    """Undo `per_token_cast_to_fp8`.

    Parameters
    ----------
    x_fp8 : torch.Tensor
        float8_e4m3fn [rows, columns].
    x_scales : torch.Tensor
        float32 [rows, groups], with any strides; or int32 [rows, groups / 4], four exponents (UE8M0) an element. Of
        another shape they are taken in their order, a row's after the other's, as DeepEP takes them.

    Returns
    -------
    torch.Tensor
        bfloat16 [rows, columns].
    """
    from deep_ep_py.moe import fp8

    packed = fp8.PACKED if x_scales.dtype == torch.int32 else 1
    filled = _filled_up(x_fp8.view(torch.uint8), _GROUP * packed).view(torch.float8_e4m3fn)
    scales = x_scales.reshape(filled.shape[0], -1) if len(filled) else x_scales
    return fp8.per_token_cast_back(filled, scales)[:, : x_fp8.shape[1]].contiguous()


def inplace_unique(x: torch.Tensor, num_slots: int) -> None:
    """Leave each row's distinct ids, the largest first, and -1 behind them.

    Parameters
    ----------
    x : torch.Tensor
        int64 [rows, ids], changed in place: ids below `num_slots`; negative ones are none.
    num_slots : int
        Ids there are.
    """
    ids = torch.arange(num_slots, dtype=x.dtype, device=x.device)
    # One more place, for what is none.
    there = torch.zeros((x.shape[0], num_slots + 1), dtype=torch.bool, device=x.device)
    there.scatter_(1, x.masked_fill(x < 0, num_slots), True)
    kept = min(num_slots, x.shape[1])
    x[:, :kept] = torch.where(there[:, :num_slots], ids, -1).sort(dim=1, descending=True).values[:, :kept]
    x[:, kept:] = -1


def create_grouped_scores(scores: torch.Tensor, group_idx: torch.Tensor, num_groups: int) -> torch.Tensor:
    """Return the scores with 0 for the experts of groups that a token does not choose.

    Parameters
    ----------
    scores : torch.Tensor
        [tokens, experts].
    group_idx : torch.Tensor
        int64 [tokens, chosen]: groups of neighbouring experts.
    num_groups : int
        Groups there are.

    Returns
    -------
    torch.Tensor
        [tokens, experts].
    """
    chosen = torch.zeros((scores.shape[0], num_groups), dtype=torch.bool, device=scores.device)
    chosen.scatter_(1, group_idx, True)
    return scores * chosen.repeat_interleave(scores.shape[1] // num_groups, dim=1)


def hash_tensor(t: torch.Tensor) -> int:
    """Return the sum of a contiguous tensor's bytes taken as int32."""
    return int(t.view(torch.int32).sum())
