"""FP8 rows with a scale for every 128 elements of a token, as DeepEP's `Buffer.dispatch` accepts them."""

from __future__ import annotations

import torch
from torch import Tensor

from deep_ep_py.device.rowwise.kernels import casts_for
from deep_ep_py.device.rowwise.torch_kernels import GROUP

PACKED = 4
"""Exponents per int32."""
_MANTISSA_BITS = 23


def per_token_cast_to_fp8(x: Tensor, round_scale: bool = False, use_ue8m0: bool = False) -> tuple[Tensor, Tensor]:
    """Cast rows to e4m3, scaling each 128 elements so that the largest becomes 448.

    Parameters
    ----------
    x : torch.Tensor
        bfloat16 or float32 [rows, hidden], contiguous, hidden a multiple of 128.
    round_scale : bool
        Whether scales are rounded up to powers of two.
    use_ue8m0 : bool
        Whether scales are returned as their exponents; requires `round_scale`, and hidden to be a multiple of 512.

    Returns
    -------
    x : torch.Tensor
        float8_e4m3fn [rows, hidden].
    scales : torch.Tensor
        float32 [rows, hidden / 128]: the factors that undo the scaling. With `use_ue8m0`, int32 [rows, hidden / 512]:
        four biased exponents each, the first in the lowest byte.

    Raises
    ------
    TypeError, ValueError
        The message names the argument.
    """
    if x.dtype not in (torch.bfloat16, torch.float32):
        raise TypeError(f"x={x.dtype}: expected torch.bfloat16 or torch.float32")
    multiple = GROUP * PACKED if use_ue8m0 else GROUP
    if x.dim() != 2 or x.shape[1] % multiple or not x.is_contiguous():
        layout = "" if x.is_contiguous() else ", not contiguous"
        raise ValueError(f"x={list(x.shape)}{layout}: expected [rows, a multiple of {multiple}], contiguous")
    if use_ue8m0 and not round_scale:
        raise ValueError("use_ue8m0=True: expected together with round_scale=True, since scales are powers of two")
    rows, scales = casts_for(x.device).cast_to_fp8(x, round_scale)
    if use_ue8m0:
        exponents = scales.view(torch.int32) >> _MANTISSA_BITS
        scales = exponents.to(torch.uint8).view(torch.int32)
    return rows, scales


def per_token_cast_back(x: Tensor, scales: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Undo `per_token_cast_to_fp8`, except for its rounding.

    Parameters
    ----------
    x : torch.Tensor
        float8_e4m3fn [rows, hidden], contiguous.
    scales : torch.Tensor
        float32 [rows, hidden / 128] or int32 [rows, hidden / 512], with any strides.
    dtype : torch.dtype
        Type of the result.

    Returns
    -------
    torch.Tensor
        `dtype` [rows, hidden].

    Raises
    ------
    TypeError, ValueError
        The message names the argument.
    """
    if x.dtype != torch.float8_e4m3fn or scales.dtype not in (torch.float32, torch.int32):
        raise TypeError(f"x={x.dtype}, scales={scales.dtype}: expected float8_e4m3fn, and float32 or int32")
    if x.dim() != 2 or not x.is_contiguous():
        raise ValueError(f"x={list(x.shape)} with strides {x.stride()}: expected [rows, hidden], contiguous")
    packed = GROUP * PACKED if scales.dtype == torch.int32 else GROUP
    if scales.shape != (x.shape[0], x.shape[1] // packed) or x.shape[1] % packed:
        raise ValueError(f"scales={list(scales.shape)}: expected [rows, hidden / {packed}] for x={list(x.shape)}")
    if scales.dtype == torch.int32:
        # With a single word per row, `contiguous` would keep any stride, but the view as bytes needs a stride of 1.
        scales = scales.clone(memory_format=torch.contiguous_format)
        scales = (scales.view(torch.uint8).to(torch.int32) << _MANTISSA_BITS).view(torch.float32)
    return casts_for(x.device).cast_back(x, scales.contiguous(), dtype)
