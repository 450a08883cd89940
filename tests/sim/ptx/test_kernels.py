"""The interpreted PTX of every kernel against the oracle, independent of what g++ makes of the sources. The order of
its memory accesses is checked: no two of them race.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from builds import LONG
from deep_ep_py.base.native import C
from interpreted import interpreted
from interpreted_calls import (
    NIC,
    WIDE_NIC,
    elastic,
    going_on,
    going_on_with_low_latency,
    low_latency_calls,
    masking,
    normal,
    recovering,
    summing_at_nodes,
)

# `make test` interprets the PTX of both modes in test_weakened.py.
pytestmark = [pytest.mark.skipif(C.WARP_SIZE != 32, reason="warps have 32 threads in PTX"), pytest.mark.thorough]

ARCHITECTURES = ("sm_80", "sm_90a", "sm_100a", "sm_120a") if LONG else ("sm_90a",)
takes_long = pytest.mark.skipif(not LONG, reason="takes long: DEEP_EP_LONG=1")


FEW = [(2, "proxy"), (1, "peer"), (3, "peer"), (3, "ibgda")]
BY_RANKS = [(ranks, fabric) for ranks in (1, 2, 4, 8) for fabric in ("peer", "ibgda", "proxy")] if LONG else FEW


@pytest.fixture(params=ARCHITECTURES)
def seeds(request: pytest.FixtureRequest) -> Iterator[range]:
    """Set the architecture of a test, and return the seeds of its schedules."""
    many = 21 if request.param in ("sm_80", "sm_90a") else 3
    with interpreted(request.param):
        yield range(1, many if LONG else 2)
    C.ptx.watch(False)


@pytest.mark.parametrize(("ranks", "fabric"), BY_RANKS)
def test_normal_mode(seeds: range, ranks: int, fabric: str) -> None:
    normal(ranks, seeds, fabric=fabric)


@pytest.mark.parametrize(
    ("ranks", "fabric", "summed_on_the_way"),
    [(2, "ibgda", False), pytest.param(3, "peer", True, marks=takes_long)],
)
def test_elastic(seeds: range, ranks: int, fabric: str, summed_on_the_way: bool) -> None:
    elastic(ranks, seeds, fabric=fabric, allow_multiple_reduction=summed_on_the_way)


@takes_long
def test_elastic_over_two_hops(seeds: range) -> None:
    elastic(4, seeds, fabric="ibgda", ranks_per_node=2)


@pytest.mark.parametrize(("ranks", "fabric"), BY_RANKS)
def test_low_latency_mode(seeds: range, ranks: int, fabric: str) -> None:
    low_latency_calls(ranks, seeds, fabric=fabric)


@pytest.mark.parametrize("ranks", [4, 8] if LONG else [4])
def test_two_hops(seeds: range, ranks: int) -> None:
    normal(ranks, seeds, fabric="ibgda", ranks_per_node=2)


@pytest.mark.parametrize("ranks", [4, 8] if LONG else [4])
def test_rows_once_to_each_node(seeds: range, ranks: int) -> None:
    low_latency_calls(ranks, seeds, fabric="ibgda", ranks_per_node=2, once_per_node=True)


@pytest.mark.parametrize("ranks", [4, 8] if LONG else [4])
def test_results_that_are_summed_at_nodes(seeds: range, ranks: int) -> None:
    summing_at_nodes(ranks, seeds, fabric="ibgda", ranks_per_node=2)


@takes_long
def test_rounds(seeds: range) -> None:
    """Outputs are larger than a region."""
    normal(3, seeds, num_nvl_bytes=84 << 10, fabric="peer", arena_bytes=0)


@takes_long
def test_full_rings_of_a_proxy(seeds: range) -> None:
    normal(2, seeds, num_nvl_bytes=104 << 10, blocks=6, fabric="proxy", nic=replace(NIC, blocks=8))


@pytest.mark.parametrize("fabric", ["ibgda", pytest.param("proxy", marks=takes_long)])
def test_recovering_again_and_again(seeds: range, fabric: str) -> None:
    recovering(2, seeds, fabric=fabric, nic=NIC)


@pytest.mark.parametrize(
    "fabric", ["peer", pytest.param("ibgda", marks=takes_long), pytest.param("proxy", marks=takes_long)]
)
def test_going_on_after_a_rank_that_did_not_come(seeds: range, fabric: str) -> None:
    going_on(3, seeds, fabric=fabric)
    going_on_with_low_latency(3, seeds, fabric=fabric)


@takes_long
def test_going_on_over_two_hops(seeds: range) -> None:
    going_on(4, seeds, fabric="ibgda", ranks_per_node=2)


@pytest.mark.parametrize("fabric", ["peer", "ibgda"])
def test_masking(seeds: range, fabric: str) -> None:
    masking(3, seeds, fabric=fabric, nic=WIDE_NIC)
