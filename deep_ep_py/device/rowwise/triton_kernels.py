"""The layer's kernels in Triton; each function does the same as its namesake in `torch_kernels`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from deep_ep_py.device.rowwise import torch_kernels

_GROUP = tl.constexpr(torch_kernels.GROUP)
_FP8_MAX = tl.constexpr(torch_kernels.FP8_MAX)
_SMALLEST_AMAX = tl.constexpr(torch_kernels.SMALLEST_AMAX)
_MAX_COLUMNS = 1024
"""Maximum number of columns of a row in one block."""


@triton.jit
def _gather(x, slots, weights, out, hidden, topk, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + row)
    values = tl.load(x + slot // topk * hidden + column, mask=column < hidden)
    if WEIGHTED:
        values = (values.to(tl.float32) * tl.load(weights + slot)).to(values.dtype)
    tl.store(out + row * hidden + column, values, mask=column < hidden)


@triton.jit
def _sum(x, position, weights, out, hidden, TOPK: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for choice in range(TOPK):
        source = tl.load(position + row * TOPK + choice)
        # If there is no such row, nothing is read and 0 is added.
        there = column < tl.where(source >= 0, hidden, 0)
        values = tl.load(x + source * hidden + column, mask=there, other=0.0).to(tl.float32)
        if WEIGHTED:
            values *= tl.load(weights + row * TOPK + choice)
        total += values
    tl.store(out + row * hidden + column, total.to(out.dtype.element_ty), mask=column < hidden)


@triton.jit
def _dot(a, b, position, out, hidden, topk, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    choice = tl.program_id(1)
    source = tl.load(position + row * topk + choice)
    total = tl.zeros((BLOCK,), tl.float32)
    length = tl.where(source >= 0, hidden, 0)
    for begin in range(0, hidden, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        there = column < length
        left = tl.load(a + row * hidden + column, mask=there, other=0.0).to(tl.float32)
        total += left * tl.load(b + source * hidden + column, mask=there, other=0.0).to(tl.float32)
    tl.store(out + row * topk + choice, tl.sum(total, axis=0))


@triton.jit
def _to_fp8(x, out, scales, groups, ROUND_SCALE: tl.constexpr):
    group = tl.program_id(0).to(tl.int64) * groups + tl.program_id(1)
    element = group * _GROUP + tl.arange(0, _GROUP)
    values = tl.load(x + element).to(tl.float32)
    amax = tl.maximum(tl.max(tl.abs(values), axis=0), _SMALLEST_AMAX)
    scale = amax / _FP8_MAX
    factor = _FP8_MAX / amax
    if ROUND_SCALE:
        scale = ((scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
        factor = 1 / scale
    tl.store(out + element, (values * factor).to(out.dtype.element_ty))
    tl.store(scales + group, scale)


@triton.jit
def _from_fp8(x, scales, out, groups):
    group = tl.program_id(0).to(tl.int64) * groups + tl.program_id(1)
    element = group * _GROUP + tl.arange(0, _GROUP)
    values = tl.load(x + element).to(tl.float32) * tl.load(scales + group)
    tl.store(out + element, values.to(out.dtype.element_ty))


def _on_its_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """Launch on the GPU of the first tensor, since Triton uses the current one."""

    @functools.wraps(function)
    def launch(x: Tensor, *arguments: Any) -> Any:
        with torch.cuda.device_of(x):
            return function(x, *arguments)

    return launch


def _block(hidden: int) -> int:
    return min(triton.next_power_of_2(hidden), _MAX_COLUMNS)


@_on_its_device
def gather_rows(x: Tensor, slots: Tensor, topk: int, weights: Tensor | None) -> Tensor:
    """As `torch_kernels.gather_rows`."""
    rows, hidden = slots.shape[0], x.shape[1]
    out = x.new_empty((rows, hidden))
    if out.numel():
        block = _block(hidden)
        grid = (rows, triton.cdiv(hidden, block))
        _gather[grid](x, slots, weights, out, hidden, topk, WEIGHTED=weights is not None, BLOCK=block)
    return out


@_on_its_device
def sum_rows(x: Tensor, position: Tensor, weights: Tensor | None) -> Tensor:
    """As `torch_kernels.sum_rows`."""
    (rows, topk), hidden = position.shape, x.shape[1]
    out = x.new_empty((rows, hidden))
    if out.numel():
        block = _block(hidden)
        grid = (rows, triton.cdiv(hidden, block))
        _sum[grid](x, position, weights, out, hidden, TOPK=topk, WEIGHTED=weights is not None, BLOCK=block)
    return out


@_on_its_device
def dot_rows(a: Tensor, b: Tensor, position: Tensor) -> Tensor:
    """As `torch_kernels.dot_rows`."""
    out = torch.empty(position.shape, dtype=torch.float32, device=a.device)
    if out.numel():
        _dot[tuple(position.shape)](a, b, position, out, a.shape[1], position.shape[1], BLOCK=_block(a.shape[1]))
    return out


@_on_its_device
def cast_to_fp8(x: Tensor, round_scale: bool) -> tuple[Tensor, Tensor]:
    """As `torch_kernels.cast_to_fp8`."""
    rows, groups = x.shape[0], x.shape[1] // torch_kernels.GROUP
    out = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty((rows, groups), dtype=torch.float32, device=x.device)
    if out.numel():
        _to_fp8[(rows, groups)](x, out, scales, groups, ROUND_SCALE=round_scale)
    return out, scales


@_on_its_device
def cast_back(x: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """As `torch_kernels.cast_back`."""
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    if out.numel():
        _from_fp8[tuple(scales.shape)](x, scales, out, scales.shape[1])
    return out
