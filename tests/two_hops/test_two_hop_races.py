"""Two hops without Python: ranks of the native program, under many schedules and every build's checks."""

from __future__ import annotations

import pytest

from builds import schedules
from native_programs import build_protocol, run


@pytest.mark.parametrize("fabric", ["peer", "weak", "ibgda"])
def test_native_ranks(fabric: str) -> None:
    for seed in schedules(4):
        result = run(build_protocol(), f"two hops {fabric}", str(seed))
        assert result.returncode == 0, f"seed {seed}: {result.stderr[-4000:]}"
