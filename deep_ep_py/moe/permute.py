"""Permutation of rows from token order to expert order and back, as ops with gradients.

A *slot* is one choice of one row, with index `row * top-k + choice`. The slots, sorted by expert, are the rows of the
experts' input.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from deep_ep_py.device.rowwise.kernels import kernels_for


class Permutation(NamedTuple):
    """A mapping between rows and the permuted rows that experts read.

    Attributes
    ----------
    slots : torch.Tensor
        int64 [permuted rows]: the slot of each; sorted by expert, then slot.
    position : torch.Tensor
        int64 [rows, top-k]: the permuted row of each slot, -1 if its expert is elsewhere.
    ends : torch.Tensor
        int64 [experts]: end of each expert's permuted rows, where those of the next expert begin.
    """

    slots: Tensor
    position: Tensor
    ends: Tensor


@torch.library.custom_op(
    "deep_ep::sort_by_expert",
    mutates_args=(),
    schema="(Tensor topk_idx, int experts) -> (Tensor slots, Tensor position, Tensor ends)",
)
def _sort_by_expert(topk_idx: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    topk_idx = topk_idx.contiguous()
    ids = topk_idx.flatten()
    keys, slots = torch.where((ids < 0) | (ids >= experts), experts, ids).sort(stable=True)
    ends = torch.searchsorted(keys, torch.arange(experts, dtype=keys.dtype, device=keys.device), right=True)
    slots = slots[: int(ends[-1])].clone()
    position = torch.full_like(topk_idx, -1, dtype=torch.int64)
    position.view(-1)[slots] = torch.arange(slots.shape[0], device=slots.device)
    return slots, position, ends


@_sort_by_expert.register_fake
def _(topk_idx: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    return (
        topk_idx.new_empty((torch.library.get_ctx().new_dynamic_size(),), dtype=torch.int64),
        topk_idx.new_empty(topk_idx.shape, dtype=torch.int64),
        topk_idx.new_empty((experts,), dtype=torch.int64),
    )


@torch.library.custom_op(
    "deep_ep::permute", mutates_args=(), schema="(Tensor x, Tensor slots, Tensor position) -> Tensor"
)
def _permute(x: Tensor, slots: Tensor, position: Tensor) -> Tensor:
    return kernels_for(x.device).gather_rows(x.contiguous(), slots, position.shape[1], None)


@_permute.register_fake
def _(x: Tensor, slots: Tensor, position: Tensor) -> Tensor:
    return x.new_empty((slots.shape[0], x.shape[1]))


@torch.library.custom_op(
    "deep_ep::unpermute",
    mutates_args=(),
    schema="(Tensor x, Tensor? weights, Tensor slots, Tensor position) -> Tensor",
)
def _unpermute(x: Tensor, weights: Tensor | None, slots: Tensor, position: Tensor) -> Tensor:
    given = None if weights is None else weights.contiguous()
    return kernels_for(x.device).sum_rows(x.contiguous(), position, given)


@_unpermute.register_fake
def _(x: Tensor, weights: Tensor | None, slots: Tensor, position: Tensor) -> Tensor:
    return x.new_empty((position.shape[0], x.shape[1]))


@torch.library.custom_op(
    "deep_ep::unpermute_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor x, Tensor weights, Tensor slots, Tensor position) -> (Tensor, Tensor)",
)
def _unpermute_backward(
    grad: Tensor, x: Tensor, weights: Tensor, slots: Tensor, position: Tensor
) -> tuple[Tensor, Tensor]:
    kernels, grad = kernels_for(x.device), grad.contiguous()
    grad_x = kernels.gather_rows(grad, slots, position.shape[1], weights.contiguous())
    return grad_x, kernels.dot_rows(grad, x.contiguous(), position)


@_unpermute_backward.register_fake
def _(grad: Tensor, x: Tensor, weights: Tensor, slots: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weights.new_empty(weights.shape, dtype=torch.float32)


def _keep_permutation(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:])


def _permute_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    slots, position = ctx.saved_tensors
    return _unpermute(grad, None, slots, position), None, None


def _keep_all(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _weighted_sum_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return *_unpermute_backward(grad, *ctx.saved_tensors), None, None


_permute.register_autograd(_permute_backward, setup_context=_keep_permutation)
_unpermute.register_autograd(_weighted_sum_backward, setup_context=_keep_all)


def sort_by_expert(topk_idx: Tensor, experts: int) -> Permutation:
    """Sort the choices of all rows by expert.

    Parameters
    ----------
    topk_idx : torch.Tensor
        Integers [rows, top-k]; ids outside [0, experts) mean experts elsewhere.
    experts : int
        Number of experts here.

    Returns
    -------
    Permutation
        Its size depends on the data, so on a GPU the host waits for it.
    """
    return Permutation(*_sort_by_expert(topk_idx, experts))


def permute(x: Tensor, permutation: Permutation) -> Tensor:
    """Copy rows into expert order.

    Parameters
    ----------
    x : torch.Tensor
        [rows, hidden].
    permutation : Permutation
        From `sort_by_expert`.

    Returns
    -------
    torch.Tensor
        [permuted rows, hidden] of x's dtype, sorted by expert. Gradients are summed in fp32 over the choices of a row.
    """
    return _permute(x, permutation.slots, permutation.position)


def unpermute(x: Tensor, weights: Tensor, permutation: Permutation) -> Tensor:
    """Return, for each row, the weighted sum of its experts' results: the reverse of `permute`.

    Parameters
    ----------
    x : torch.Tensor
        [permuted rows, hidden].
    weights : torch.Tensor
        float32 [rows, top-k].
    permutation : Permutation
        The permutation that `permute` used.

    Returns
    -------
    torch.Tensor
        [rows, hidden] of x's dtype, summed in fp32 in the order of the choices and rounded once; 0 for rows without a
        choice here.
    """
    return _unpermute(x, weights, permutation.slots, permutation.position)
