"""Integer rounding to float8_e4m3fn agrees with torch."""

from __future__ import annotations

import pytest
import torch

from deep_ep_py.base.native import C

pytestmark = pytest.mark.once

MOST = 448.0


def rounded(values: torch.Tensor) -> torch.Tensor:
    out = torch.empty(len(values), dtype=torch.uint8)
    C.round_to_e4m3(out.data_ptr(), values.data_ptr(), len(values))
    return out


def test_all_bfloat16_values() -> None:
    """Values that are too large, including infinities, become the largest one; NaNs become one NaN."""
    values = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).float()
    wanted = values.clamp(-MOST, MOST).to(torch.float8_e4m3fn).view(torch.uint8)
    got, nans = rounded(values), values.isnan()
    assert torch.equal(got[~nans], wanted[~nans])
    assert (got[nans] == 0x7F).all()


def test_ties_and_their_neighbours() -> None:
    exact = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    ties = (exact[1:] + exact[:-1]) / 2
    values = torch.cat([ties, ties.nextafter(torch.tensor(0.0)), ties.nextafter(torch.tensor(torch.inf)), -ties])
    assert torch.equal(rounded(values), values.to(torch.float8_e4m3fn).view(torch.uint8))
