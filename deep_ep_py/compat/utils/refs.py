"""Stand-in for `deep_ep.utils.refs`: dispatch and combine in plain torch, to compare an `ElasticBuffer`'s with.

Collective functions use torch's default process group. Tensors are made on the device of the arguments.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist

from .envs import get_global_seed

_PRIME = 131071


def dispatch(
    x: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor | None,
    num_max_tokens_per_rank: int,
    num_experts: int,
) -> tuple[Any, torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """Send each token once to every rank that has at least one of its experts. Collective.

    Parameters
    ----------
    x : torch.Tensor or tuple of torch.Tensor
        [num_tokens, hidden], or such rows and their scales, [num_tokens, num_scales].
    topk_idx : torch.Tensor
        Integers [num_tokens, num_topk]; -1 for no expert.
    topk_weights : torch.Tensor, optional
        [num_tokens, num_topk].
    num_max_tokens_per_rank : int
        At least the number of tokens of any rank, and the same on all ranks.
    num_experts : int
        On all ranks.

    Returns
    -------
    recv_x : torch.Tensor or tuple of torch.Tensor
        [num_recv_tokens, hidden], by source rank and then by token; with scales if they were given.
    recv_topk_idx : torch.Tensor
        [num_recv_tokens, num_topk]: ids among this rank's experts; -1 where the expert is elsewhere.
    recv_topk_weights : torch.Tensor or None
        [num_recv_tokens, num_topk], also those of experts elsewhere.
    recv_src_token_idx : torch.Tensor
        int32 [num_recv_tokens]: source rank times `num_max_tokens_per_rank`, plus the token's index there.
    num_recv_tokens_per_rank : torch.Tensor
        int32 [num_ranks], by source rank.

    Raises
    ------
    ValueError
        An argument's size does not fit the others; the message names it.
    """
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    rows, scales = x if isinstance(x, tuple) else (x, None)
    if num_experts % num_ranks:
        raise ValueError(f"num_experts={num_experts}: expected a multiple of the {num_ranks} ranks")
    if len(rows) > num_max_tokens_per_rank:
        raise ValueError(f"num_max_tokens_per_rank={num_max_tokens_per_rank}: expected at least {len(rows)}, as x has")
    if len(topk_idx) != len(rows) or (scales is not None and len(scales) != len(rows)):
        raise ValueError(f"x of {len(rows)} rows: expected as many rows of topk_idx ({len(topk_idx)}) and of scales")
    if topk_weights is not None and topk_weights.shape != topk_idx.shape:
        raise ValueError(f"topk_weights of shape {list(topk_weights.shape)}: expected {list(topk_idx.shape)}")
    num_local_experts = num_experts // num_ranks

    ranks = torch.arange(num_ranks, device=topk_idx.device)
    goes_to = ((topk_idx // num_local_experts)[:, :, None] == ranks).any(1)
    tokens = goes_to.t().nonzero()[:, 1]  # by destination, then by token
    sent = goes_to.sum(0, dtype=torch.int32)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)
    splits = received.tolist(), sent.tolist()

    recv_x: Any = _exchange(rows, tokens, *splits)
    if scales is not None:
        recv_x = recv_x, _exchange(scales, tokens, *splits)
    local_idx = _exchange(topk_idx, tokens, *splits) - rank * num_local_experts
    source = torch.arange(len(rows), dtype=torch.int32, device=tokens.device) + rank * num_max_tokens_per_rank
    return (
        recv_x,
        local_idx.masked_fill_((local_idx < 0) | (local_idx >= num_local_experts), -1),
        None if topk_weights is None else _exchange(topk_weights, tokens, *splits),
        _exchange(source, tokens, *splits),
        received,
    )


def _exchange(rows: torch.Tensor, tokens: torch.Tensor, received: list[int], sent: list[int]) -> torch.Tensor:
    """Send rows of the given indices, so many to each rank, and return those that arrive."""
    # Not every backend knows float8.
    wire = rows.view(torch.uint8) if rows.element_size() == 1 else rows
    sending = wire.index_select(0, tokens)
    arriving = sending.new_empty((sum(received), *sending.shape[1:]))
    dist.all_to_all_single(arriving, sending, received, sent)
    return arriving.view(rows.dtype)


def generate_pre_combine_data(
    src_token_global_idx: torch.Tensor, num_max_tokens_per_rank: int, num_topk: int, hidden: int
) -> torch.Tensor:
    """Return what the experts could have made of tokens: values that every rank can compute for every token.

    Element h for choice k of token t is the sine of (h + 1) p + sin(seed), computed in float32. The seed is
    `get_global_seed()`, and p is from 0 to 1: (s + 1) / n, where n is `num_topk` times the largest number of tokens on
    all ranks, and s is (t num_topk + k) 131071 modulo n.

    Parameters
    ----------
    src_token_global_idx : torch.Tensor
        Integers [num_tokens], as `recv_src_token_idx` of `dispatch`.
    num_max_tokens_per_rank, num_topk, hidden : int
        Sizes.

    Returns
    -------
    torch.Tensor
        bfloat16 [num_tokens, num_topk, hidden].
    """
    device = src_token_global_idx.device
    modulus = dist.get_world_size() * num_max_tokens_per_rank * num_topk
    choices = src_token_global_idx[:, None] * num_topk + torch.arange(num_topk, device=device)
    phases = ((choices * _PRIME) % modulus).float().add(1).div(modulus)
    columns = torch.arange(1, hidden + 1, dtype=torch.float32, device=device)
    angles = phases[:, :, None] * columns + math.sin(get_global_seed())
    return angles.sin().bfloat16()


def ordered_accumulate(data: torch.Tensor, initial_value: torch.Tensor | None = None) -> torch.Tensor:
    """Sum each token's rows in order of its choices.

    Parameters
    ----------
    data : torch.Tensor
        [num_tokens, num_topk, hidden].
    initial_value : torch.Tensor, optional
        [num_tokens, hidden]: what the first rows are added to, unchanged itself. Sums are kept in its type, or in
        float32 without it.

    Returns
    -------
    torch.Tensor
        [num_tokens, hidden], of the type of `data`.
    """
    nothing = torch.zeros((data.shape[0], data.shape[2]), dtype=torch.float32, device=data.device)
    sums = nothing if initial_value is None else initial_value.clone()
    for rows in data.unbind(1):
        sums += rows.float()
    return sums.to(data.dtype)


def combine(
    y: torch.Tensor,
    topk_idx: torch.Tensor,
    num_scaleout_ranks: int,
    num_scaleup_ranks: int,
    num_experts: int,
    bias: tuple[torch.Tensor, torch.Tensor] | torch.Tensor | None,
    reduce_in_local: bool,
    reduce_in_scaleup: bool,
) -> torch.Tensor:
    """Sum the rows of each token's choices, rounding where a combine rounds sums on their way.

    A sum begins with the biases, and is kept in float32. Then come the rows in order of choices, or the sums made on
    the way, rounded to the type of `y`, each in the place of the last choice that it contains.

    Parameters
    ----------
    y : torch.Tensor
        [num_tokens, num_topk, hidden]: a row for each choice. Rows of choices of -1 count as any other, so clear them.
    topk_idx : torch.Tensor
        Integers [num_tokens, num_topk], distinct except for -1.
    num_scaleout_ranks, num_scaleup_ranks : int
        Domains, as of `get_logical_domain_size`.
    num_experts : int
        On all ranks.
    bias : torch.Tensor or tuple of torch.Tensor, optional
        One or two tensors [num_tokens, hidden].
    reduce_in_local : bool
        Whether each rank sums a token's rows before they are sent. False for expanded rows without
        `allow_multiple_reduction`.
    reduce_in_scaleup : bool
        Whether sums of a scale-up domain are summed there too, before they leave it. Requires `reduce_in_local`.

    Returns
    -------
    torch.Tensor
        [num_tokens, hidden], of the type of `y`.

    Raises
    ------
    ValueError
        `reduce_in_scaleup` without `reduce_in_local`.
    """
    if reduce_in_scaleup and not reduce_in_local:
        raise ValueError(f"reduce_in_scaleup={reduce_in_scaleup}: expected reduce_in_local too")
    num_local_experts = num_experts // (num_scaleout_ranks * num_scaleup_ranks)
    if reduce_in_local:
        y = _summed_at_last(y, topk_idx // num_local_experts)
    if reduce_in_scaleup:
        y = _summed_at_last(y, topk_idx // (num_local_experts * num_scaleup_ranks))
    if isinstance(bias, tuple):
        bias = bias[0].float() + bias[1].float()
    return ordered_accumulate(y, None if bias is None else bias.float())


def _summed_at_last(y: torch.Tensor, owner: torch.Tensor) -> torch.Tensor:
    """Return the sum of each owner's rows in the place of its last, and zeros in the other places.

    `y`: [num_tokens, num_topk, hidden]. `owner`: [num_tokens, num_topk].
    """
    sums = torch.zeros_like(y)
    for place in range(y.shape[1]):
        same = owner == owner[:, place, None]
        is_last = ~same[:, place + 1 :].any(1)
        earlier = y[:, : place + 1].masked_fill(~same[:, : place + 1, None], 0)
        sums[:, place] = ordered_accumulate(earlier).masked_fill(~is_last[:, None], 0)
    return sums
