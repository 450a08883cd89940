"""Grouped matrix products, as ops with gradients: the numbers of rows per expert may be unknown to a compiler."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


def _parts(ends: Tensor) -> Iterator[tuple[int, slice]]:
    begin = 0
    for expert, end in enumerate(ends.tolist()):
        yield expert, slice(begin, end)
        begin = end


@torch.library.custom_op(
    "deep_ep::grouped_linear", mutates_args=(), schema="(Tensor x, Tensor weight, Tensor ends) -> Tensor"
)
def _grouped_linear(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
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
    """Multiply each expert's rows by its matrix. The host reads the numbers of rows: on a GPU it waits for them.

    Parameters
    ----------
    x : torch.Tensor
        [rows, in], sorted by expert.
    weight : torch.Tensor
        [experts, out, in], of the same dtype.
    ends : torch.Tensor
        int64 [experts]: end of each expert's rows.

    Returns
    -------
    torch.Tensor
        [rows, out].
    """
    return _grouped_linear(x, weight, ends)
