"""The bytes of rows in flight at any time, in the compiler's PTX, must suffice."""

from __future__ import annotations

import pytest

from deep_ep_py.base.native import C
from deep_ep_py.tools.profile import Workload, profiles, run
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
