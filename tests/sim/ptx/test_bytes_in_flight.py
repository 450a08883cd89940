"""The bytes of rows in flight at any time, in the compiler's PTX, must suffice."""

from __future__ import annotations

from typing import Any

import pytest

import deep_ep_py as deep_ep
from deep_ep_py.base.native import C
from deep_ep_py.testing import run_ranks
from deep_ep_py.tools.profile import Workload, interpreting, profiles, run
from interpreted import images_of

pytestmark = pytest.mark.skipif(C.WARP_SIZE != 32, reason="warps have 32 threads in PTX")

WORKLOAD = Workload(ranks=4, tokens=12, topk=6, experts=32, blocks=1)


@pytest.mark.thorough
def test_normal_mode() -> None:
    """By Little's law: 64 KiB for each of 24 SMs that draw 400 GB/s from peers whose memory answers in 3.9 us."""
    rows, counted = run(WORKLOAD, images_of(WORKLOAD.architecture))
    found = {profile.name: profile for profile in profiles(counted, rows, WORKLOAD.row_bytes)}
    assert found["combine"].in_flight_per_block >= 64 << 10
    assert found["dispatch"].in_flight_per_block >= 32 << 10
    for profile in found["combine"], found["dispatch"]:
        assert profile.sectors_ratio <= 1.02


def test_chunks_of_two_hops_have_rows_for_all_warps() -> None:
    """Of a block; fewer where a region has no room for them, and on a CPU as many as the link needs."""

    def rows(group: Any, buffer_bytes: int) -> int:
        link = deep_ep.Link(1e9, 20e-6)
        given = {"device": "cpu", "fabric": "ibgda", "ranks_per_node": 2, "link": link, "timeout": 30.0}
        with deep_ep.Buffer(group, buffer_bytes, **given) as buffer:
            return int(C.two_hops.chunk_rows(buffer._engine.runtime, C.normal.Sizes(16, 1024, 2, 8)))

    assert run_ranks(4, rows, 1 << 22) == [5] * 4
    with interpreting(images_of("sm_90a")):
        assert run_ranks(4, rows, 1 << 22) == [32] * 4
        (few,) = set(run_ranks(4, rows, 1 << 18))
    assert 1 < few < 32
