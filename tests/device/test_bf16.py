"""The conversions in device/bf16.h, which all targets share."""

from __future__ import annotations

import torch

from deep_ep_py.base.native import C

NAN = 0x7FFF


def rounded(bits: torch.Tensor) -> torch.Tensor:
    """Round fp32 values, given and returned as bits."""
    bits = bits.to(torch.int32).contiguous()
    result = torch.empty(bits.numel(), dtype=torch.uint16)
    C.round_to_bf16(result.data_ptr(), bits.data_ptr(), bits.numel())
    return result.to(torch.int32)


def by_torch(bits: torch.Tensor) -> torch.Tensor:
    """Return the result of torch, which rounds in the same way but has another NaN."""
    values = bits.to(torch.int32).view(torch.float32)
    expected = values.to(torch.bfloat16).view(torch.uint16).to(torch.int32)
    return torch.where(values.isnan(), NAN, expected)


def test_widening_is_exact() -> None:
    every = torch.arange(1 << 16, dtype=torch.int32)
    source = every.to(torch.uint16)
    result = torch.empty(every.numel(), dtype=torch.float32)
    C.widen_to_float(result.data_ptr(), source.data_ptr(), every.numel())
    assert torch.equal(result.view(torch.int32), every << 16)


def test_rounding_undoes_widening() -> None:
    every = torch.arange(1 << 16, dtype=torch.int32)
    is_nan = (every & 0x7FFF) > 0x7F80
    assert torch.equal(rounded(every << 16), torch.where(is_nan, NAN, every))


def test_rounding_to_nearest_even() -> None:
    """Just below, at and just above the midpoint of any two adjacent values, of both signs and up to infinity."""
    every = torch.arange(1 << 16, dtype=torch.int64)
    for low in (0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        bits = (every << 16 | low).to(torch.int32)
        assert torch.equal(rounded(bits), by_torch(bits)), hex(low)


def test_rounding_of_random_bits() -> None:
    generator = torch.Generator().manual_seed(1)
    bits = torch.randint(-(1 << 31), 1 << 31, (1 << 20,), generator=generator).to(torch.int32)
    assert torch.equal(rounded(bits), by_torch(bits))
