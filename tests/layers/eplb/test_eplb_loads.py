"""Loads of logical experts from counts, and loads predicted for ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from deep_ep_py import eplb

pytestmark = pytest.mark.once

LOADS = torch.tensor([[8, 4, 2, 2], [3, 3, 3, 3]])


@pytest.fixture(scope="module")
def placement() -> eplb.Placement:
    return eplb.plan(LOADS, num_physical_experts=6, num_ranks=2)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32, torch.float64])
def test_counts_of_replicas_are_summed(placement: eplb.Placement, dtype: torch.dtype) -> None:
    counts = torch.tensor([[1, 10, 100, 1000, 10000, 100000], [5, 50, 500, 5000, 50000, 500000]], dtype=dtype)
    loads = eplb.physical_to_logical(counts, placement)
    assert loads.dtype == (dtype if dtype.is_floating_point else torch.int64)
    for layer, held in enumerate(placement.physical_to_logical_map.tolist()):
        wanted = [0] * 4
        for expert, count in zip(held, counts[layer].tolist()):
            wanted[expert] += count
        assert loads[layer].tolist() == wanted
        assert torch.equal(eplb.physical_to_logical(counts[layer], placement, layer), loads[layer])


def test_sums_of_int32_do_not_wrap() -> None:
    placement = eplb.plan(torch.ones(1), num_physical_experts=4, num_ranks=2)
    counts = torch.full((4,), 2**31 - 1, dtype=torch.int32)
    assert eplb.physical_to_logical(counts, placement).tolist() == [4 * (2**31 - 1)]


def test_predicted_rows(placement: eplb.Placement) -> None:
    # Each rank has a replica of experts 0 and 1, and one of the other two experts.
    assert placement.physical_to_logical_map[0].tolist() == [0, 1, 3, 0, 2, 1]
    rows, max_over_mean = eplb.rank_loads(torch.tensor([[7, 4, 3, 1], [3, 3, 3, 3]]), placement)
    assert rows.dtype == max_over_mean.dtype == torch.float64
    assert rows.tolist() == [[7 / 2 + 2 + 1, 7 / 2 + 3 + 2], [6, 6]]
    torch.testing.assert_close(max_over_mean[0].item(), 8.5 / 7.5)
    assert max_over_mean[1] == 1


def test_a_plan_is_better_than_none() -> None:
    generator = torch.Generator().manual_seed(1)
    loads = torch.rand(4, 64, generator=generator).pow(4) * 1000
    without = eplb.Placement(
        torch.arange(64).repeat(4, 1), torch.arange(64).repeat(4, 1).unsqueeze(2), torch.ones(4, 64).long(), 16
    )
    planned = eplb.plan(loads, num_physical_experts=96, num_ranks=16)
    assert (eplb.rank_loads(loads, without).max_over_mean > 1.5).all()
    assert (eplb.rank_loads(loads, planned).max_over_mean < 1.05).all()


def test_what_is_even_is_exactly_1() -> None:
    placement = eplb.plan(torch.zeros(4), num_physical_experts=4, num_ranks=2)
    assert eplb.rank_loads(torch.zeros(4), placement).max_over_mean.tolist() == [1.0]
    # The mean of 7 times 13 / 7 is rounded up.
    placement = eplb.plan(torch.tensor([13]), num_physical_experts=7, num_ranks=7)
    rows, max_over_mean = eplb.rank_loads(torch.tensor([13]), placement)
    assert rows.mean() > rows.max() and max_over_mean == 1


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda p: eplb.rank_loads(torch.ones(2, 5), p),
            ValueError,
            r"loads=float32\[2, 5\] on cpu: expected 2 layers",
        ),
        (lambda p: eplb.rank_loads(torch.ones(4), p), ValueError, r"loads=float32\[4\].*2 layers of 4 logical experts"),
        (lambda p: eplb.rank_loads(-LOADS, p), ValueError, "loads=.*the lowest is -8"),
        (lambda p: eplb.rank_loads(LOADS, p.expert_count), TypeError, r"placement=int64\[2, 4\].*eplb.Placement"),
        (lambda p: eplb.physical_to_logical([1] * 6, p), TypeError, r"counts=\[1, .*\]: expected numbers \[2, 6\], or"),
        (lambda p: eplb.physical_to_logical(torch.ones(2, 6) > 0, p), TypeError, r"counts=bool\[2, 6\]"),
        (lambda p: eplb.physical_to_logical(torch.ones(2, 6, device="meta"), p), TypeError, "counts=.* on meta"),
        (lambda p: eplb.physical_to_logical(torch.ones(2, 4), p), ValueError, r"counts=float32\[2, 4\] on cpu"),
        (lambda p: eplb.physical_to_logical(torch.ones(3, 6), p), ValueError, r"counts=float32\[3, 6\] on cpu"),
        (lambda p: eplb.physical_to_logical(torch.ones(6), p), ValueError, "layer=None: expected 0 to 1"),
        (lambda p: eplb.physical_to_logical(torch.ones(6), p, 2), ValueError, "layer=2: expected 0 to 1"),
        (lambda p: eplb.physical_to_logical(torch.ones(2, 6), p, 1), ValueError, "layer=1: expected None"),
        (lambda p: eplb.physical_to_logical(torch.ones(6), None), TypeError, "placement=None"),
    ],
)
def test_wrong_arguments(
    placement: eplb.Placement, call: Callable[[object], object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        call(placement)
