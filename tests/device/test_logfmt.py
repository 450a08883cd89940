"""Integer rounding to LogFMT follows its definition, and is about as accurate as exact logarithms."""

from __future__ import annotations

import pytest
import torch

import logfmt
from deep_ep_py.base.native import C

pytestmark = pytest.mark.once

GROUP = logfmt.GROUP


def rounded(values: torch.Tensor) -> torch.Tensor:
    out = torch.empty(values.shape, dtype=torch.float32)
    C.round_to_logfmt(out.data_ptr(), values.data_ptr(), values.numel())
    return out


def groups_of(octaves: float, count: int = 200) -> torch.Tensor:
    """Return groups whose magnitudes are uniform on a log scale, from 2**-octaves to 1."""
    random = torch.Generator().manual_seed(int(octaves * 8))
    values = torch.exp2(-0.01 - octaves * torch.rand((count, GROUP), generator=random))
    signs = torch.where(torch.rand(values.shape, generator=random) < 0.5, -1.0, 1.0)
    return (values * signs).to(torch.bfloat16).clamp(-0.996, 0.996)


def filled(*first: float, rest: float = 0.25) -> torch.Tensor:
    values = torch.full((GROUP,), rest, dtype=torch.bfloat16)
    values[: len(first)] = torch.tensor(first).to(torch.bfloat16)
    return values


@pytest.mark.parametrize("octaves", [0.5, 3.5, 4.5, 8.0, 16.0, 31.5, 40.0])
def test_the_definition(octaves: float) -> None:
    values = groups_of(octaves)
    assert torch.equal(rounded(values), logfmt.rounded(values))


@pytest.mark.parametrize("octaves", [0.5, 3.5, 4.5, 8.0, 16.0, 31.5])
def test_errors(octaves: float) -> None:
    """At most half a step, and a mean square at most a tenth worse than that of codes from exact logarithms."""
    values = groups_of(octaves)
    exact, got = values.double(), rounded(values).double()
    if octaves < 510 / 128 - 0.1:
        assert torch.equal(got, exact)
        return
    relative = ((got - exact) / exact).abs()
    assert relative.max() <= octaves / 1020 * 1.02 + 2**-16
    best = ((logfmt.ideal(values) - exact) / exact).square().mean().sqrt()
    assert relative.square().mean().sqrt() <= 1.1 * best


def test_what_is_far_below_the_largest_becomes_zero() -> None:
    values = groups_of(60.0)
    got, most = rounded(values), values.abs().float().amax(dim=1, keepdim=True)
    assert ((got - values.float()).abs() <= torch.maximum(values.float().abs() / 31, most * 2.0**-32)).all()
    assert (got == 0).any() and torch.equal(got.signbit(), values.signbit())


def test_zeros_keep_their_signs_and_cost_no_range() -> None:
    for values in (filled(0.0, -0.0, 0.5), filled(rest=0.0), filled(rest=-0.0), filled(-0.0, 0.0, rest=2.0**-20)):
        got = rounded(values)
        assert torch.equal(got, values.float()) and torch.equal(got.signbit(), values.signbit())


def test_equal_magnitudes() -> None:
    for value in (0.996, 0.25, 2.0**-126, 2.0**-133):
        values = filled(-value, value, rest=value)
        assert torch.equal(rounded(values), values.float())


def test_subnormals() -> None:
    """Their spacing is uniform, as is that of their bits: alone they are exact, with others within 32 powers of two."""
    values = torch.arange(GROUP, dtype=torch.int16).view(torch.bfloat16)
    assert torch.equal(rounded(values), values.float())
    values = torch.arange(0, 20 * GROUP, 20, dtype=torch.int16).view(torch.bfloat16)
    got = rounded(values)
    assert torch.equal(got, logfmt.rounded(values))
    assert ((got - values.float()).abs() <= values.float() / 40 + 2.0**-130).all()


@pytest.mark.parametrize("large", [1.0, -1.0, 1e30, torch.inf, -torch.inf, torch.nan])
def test_groups_that_stay_as_they_are(large: float) -> None:
    random = torch.Generator().manual_seed(1)
    values = (torch.randn(3 * GROUP, generator=random) / 16).to(torch.bfloat16)
    values[GROUP + 5] = large
    values[GROUP + 6] = 1e-30  # any ratio is allowed
    got = rounded(values)
    own = slice(GROUP, 2 * GROUP)
    assert torch.equal(got[own].nan_to_num(), values[own].float().nan_to_num())
    assert torch.equal(got[own].isnan(), values[own].isnan())
    others = torch.cat([values[:GROUP], values[2 * GROUP :]])
    assert torch.equal(torch.cat([got[:GROUP], got[2 * GROUP :]]), rounded(others))


def test_the_difference_that_deep_ep_allows() -> None:
    """DeepEP's test of LogFMT requires less than 9e-4 for normally distributed results."""
    random = torch.Generator().manual_seed(1)
    values = (torch.randn((512, 7168), generator=random) / 8).to(torch.bfloat16)
    exact, got = values.double() + 1, rounded(values).double() + 1  # as in its calc_diff
    assert 1 - 2 * (exact * got).sum() / (exact.square() + got.square()).sum() < 1e-6
