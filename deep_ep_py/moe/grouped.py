"""Grouped matrix products, as ops with gradients: the numbers of rows per expert may be unknown to a compiler."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

_SINGLE_LAUNCH = (9, 10)
"""Major compute capabilities for which torch has a grouped product of BF16 that is one kernel."""
_ALIGNED = 8
"""Elements of BF16 that torch's kernel reads at once."""


def _without_host_wait(rows: Tensor, *sizes: int) -> bool:
    """Return whether torch has one kernel for matrices of these sizes; its other paths read the ends on the host."""
    return (
        rows.is_cuda
        and rows.dtype == torch.bfloat16
        and rows.shape[0] > 0
        and all(size % _ALIGNED == 0 for size in sizes)
        and hasattr(functional, "grouped_mm")
        and torch.cuda.get_device_capability(rows.device)[0] in _SINGLE_LAUNCH
    )


def _parts(ends: Tensor) -> Iterator[tuple[int, slice]]:
    begin = 0
    for expert, end in enumerate(ends.tolist()):
        yield expert, slice(begin, end)
        begin = end


@torch.library.custom_op(
    "deep_ep::grouped_linear", mutates_args=(), schema="(Tensor x, Tensor weight, Tensor ends) -> Tensor"
)
def _grouped_linear(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    if _without_host_wait(x, *weight.shape[1:]):
        return functional.grouped_mm(x.contiguous(), weight.transpose(1, 2), offs=ends.int())
    out = x.new_empty((x.shape[0], weight.shape[1]))
    for expert, rows in _parts(ends):
        torch.mm(x[rows], weight[expert].t(), out=out[rows])
    return out


@_grouped_linear.register_fake
def _(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[1]))


@torch.library.custom_op(
    "deep_ep::grouped_outer", mutates_args=(), schema="(Tensor a, Tensor b, Tensor ends) -> Tensor"
)
def _grouped_outer(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    if _without_host_wait(a, a.shape[1], b.shape[1]):
        return functional.grouped_mm(a.contiguous().t(), b.contiguous(), offs=ends.int())
    out = a.new_empty((ends.shape[0], a.shape[1], b.shape[1]))
    for expert, rows in _parts(ends):
        torch.mm(a[rows].t(), b[rows], out=out[expert])
    return out


@_grouped_outer.register_fake
def _(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    return a.new_empty((ends.shape[0], a.shape[1], b.shape[1]))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    x, weight, ends = ctx.saved_tensors
    return _grouped_linear(grad, weight.transpose(1, 2), ends), _grouped_outer(grad, x, ends), None


_grouped_linear.register_autograd(_backward, setup_context=_keep)


def grouped_linear(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Multiply each expert's rows by its matrix.

    On GPUs of compute capability 9.x and 10.x, BF16 rows are multiplied by torch's `grouped_mm` (torch 2.10 or later,
    sizes that are multiples of 8), for which the host does not wait. Otherwise the host reads the numbers of rows.

    Parameters
    ----------
    x : torch.Tensor
        [rows, in], sorted by expert.
    weight : torch.Tensor
        [experts, out, in], of the same dtype.
    ends : torch.Tensor
        Integers [experts]: end of each expert's rows.

    Returns
    -------
    torch.Tensor
        [rows, out]; uninitialized after the last expert's rows.

    Raises
    ------
    ValueError
        `ends` has another number of experts than `weight`.
    """
    if ends.shape[0] != weight.shape[0]:
        raise ValueError(f"ends: {ends.shape[0]} experts, expected {weight.shape[0]} as weight has")
    return _grouped_linear(x, weight, ends)
