"""The PTX of every kernel, interpreted, against the oracle: what g++ makes of the sources stays out of it. The order of
its accesses to memory is watched: no two of them race.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from builds import LONG
from deep_ep_py.core.native import C
from interpreted import interpreted
from interpreted_calls import low_latency_calls, normal

pytestmark = pytest.mark.skipif(C.WARP_SIZE != 32, reason="warps have 32 threads in PTX")

ARCHITECTURES = ("sm_80", "sm_90a", "sm_100a", "sm_120a") if LONG else ("sm_90a",)
RANKS = (1, 2, 4, 8) if LONG else (2,)


@pytest.fixture(params=ARCHITECTURES)
def seeds(request: pytest.FixtureRequest) -> Iterator[range]:
    """How many schedules a test is to see, on the architecture that it gets."""
    many = 21 if request.param in ("sm_80", "sm_90a") else 3
    with interpreted(request.param):
        yield range(1, many if LONG else 2)
    C.ptx.watch(False)


@pytest.mark.parametrize("fabric", ["peer", "ibgda", "proxy"])
@pytest.mark.parametrize("ranks", RANKS)
def test_normal_mode(seeds: range, ranks: int, fabric: str) -> None:
    normal(ranks, seeds, fabric=fabric)


@pytest.mark.parametrize("fabric", ["peer", "ibgda", "proxy"])
@pytest.mark.parametrize("ranks", RANKS)
def test_low_latency_mode(seeds: range, ranks: int, fabric: str) -> None:
    low_latency_calls(ranks, seeds, fabric=fabric)


@pytest.mark.parametrize("ranks", [4, 8] if LONG else [4])
def test_two_hops(seeds: range, ranks: int) -> None:
    normal(ranks, seeds, fabric="ibgda", ranks_per_node=2)


@pytest.mark.parametrize("ranks", [4, 8] if LONG else [4])
def test_rows_once_to_each_node(seeds: range, ranks: int) -> None:
    low_latency_calls(ranks, seeds, fabric="ibgda", ranks_per_node=2, once_per_node=True)
