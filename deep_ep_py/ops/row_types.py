"""The rows of dispatch ops: bfloat16, on their way FP8 if asked for, or FP8 rows of the caller with scales."""

from __future__ import annotations

import torch
from torch import Tensor

from deep_ep_py.base.arguments import ROW_ALIGNMENT, describe, elsewhere, flag
from deep_ep_py.buffer import Buffer
from deep_ep_py.device.rowwise.fp8 import per_token_cast_back, per_token_cast_to_fp8
from deep_ep_py.device.rowwise.torch_kernels import GROUP


def check_types(group: object, fp8: object = False, **tensors: object) -> None:
    """Check what torch would otherwise refuse by printing an op's schema and all values.

    Raises
    ------
    TypeError
        The message names the argument.
    """
    for name, value in tensors.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{name}={describe(value)}: expected a torch.Tensor")
    flag("fp8", fp8)
    if not isinstance(group, str):
        raise TypeError(f"group={describe(group)}: expected the name that deep_ep_py.ops.register returned")


def check_routes(routes: object) -> None:
    """The same for routes."""
    if not isinstance(routes, list | tuple) or not all(isinstance(one, Tensor) for one in routes):
        raise TypeError(f"routes={describe(routes)}: expected the list of tensors that a dispatch op returned")


def as_rows(x: Tensor) -> Tensor:
    """Return x, or a contiguous, aligned copy of it: gradients may be expanded, or views of other tensors."""
    if x.is_contiguous() and x.data_ptr() % ROW_ALIGNMENT == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _device(given: Tensor, buffer: Buffer) -> str:
    """Return where a tensor must be and, if it is elsewhere, what to do about that."""
    return f"{buffer.device}{elsewhere(given, buffer.device)}"


def check_rows(name: str, x: Tensor, buffer: Buffer) -> None:
    """Check that rows are of the type that combine returns, which otherwise fails only after the experts' work."""
    if x.dtype != torch.bfloat16 or x.dim() != 2 or x.device != buffer.device:
        raise TypeError(f"{name}={describe(x)}: expected bfloat16 [tokens, hidden] on {_device(x, buffer)}")


def rows_to_send(x: Tensor, scales: Tensor | None, fp8: bool, buffer: Buffer) -> Tensor | tuple[Tensor, Tensor]:
    """Return what a Buffer dispatches.

    Parameters
    ----------
    x : torch.Tensor
        bfloat16 [tokens, hidden]; with scales, rows of one byte per element.
    scales : torch.Tensor or None
        Scales of the rows, which the Buffer checks together with them.
    fp8 : bool
        Whether bfloat16 rows travel as FP8.
    buffer : Buffer
        The Buffer.
    """
    if scales is not None:
        if x.dim() != 2 or x.element_size() != 1 or x.device != buffer.device:
            raise TypeError(f"x={describe(x)}: expected rows of one byte per element on {_device(x, buffer)}")
        if scales.dim() not in (1, 2) or scales.shape[0] != x.shape[0] or scales.device != buffer.device:
            wanted = f"[{x.shape[0]}, scales] or [{x.shape[0]}]"
            raise ValueError(f"scales={describe(scales)}: expected {wanted} on {_device(scales, buffer)}")
        return as_rows(x), scales
    check_rows("x", x, buffer)
    if fp8 and x.shape[1] % GROUP:
        raise ValueError(f"x={describe(x)}: expected a multiple of {GROUP} elements per row with fp8=True")
    return per_token_cast_to_fp8(as_rows(x)) if fp8 else as_rows(x)


def received_rows(received: Tensor | tuple[Tensor, Tensor], fp8: bool) -> tuple[Tensor, Tensor]:
    """Return the rows that an op returns, and their scales: with bfloat16 rows an empty tensor."""
    if isinstance(received, Tensor):
        return received, no_scales(received)
    if fp8:
        rows = per_token_cast_back(*received)
        return rows, no_scales(rows)
    return received


def no_scales(x: Tensor) -> Tensor:
    """Return what ops return as the scales of rows that have none: an op returns a tensor or always none."""
    return x.new_empty(0, dtype=torch.float32)


def like_received(x: Tensor, scales: Tensor | None, rows: int | torch.SymInt) -> tuple[Tensor, Tensor]:
    """Return tensors like those of `received_rows`, for a compiler."""
    received = x.new_empty((rows, x.shape[1]))
    return received, no_scales(x) if scales is None else scales.new_empty((rows, *scales.shape[1:]))


def zero_rows(received: Tensor | tuple[Tensor, Tensor], beyond: Tensor) -> None:
    """Zero the rows that bool [rows] `beyond` marks, with their scales: both are uninitialized memory."""
    for tensor in received if isinstance(received, tuple) else (received,):
        bits = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
        bits.masked_fill_(beyond.view(-1, *[1] * (bits.dim() - 1)), 0)
