"""Two-hop mode without Python: ranks of the native program, under many schedules and the checks of every build."""

from __future__ import annotations

import pytest

from builds import schedules
from mutants.mutant import TWO_HOPS
from native_programs import build_protocol, run


@pytest.mark.parametrize("scenario", TWO_HOPS)
@pytest.mark.scenarios
def test_native_ranks(scenario: str) -> None:
    for seed in schedules(4):
        result = run(build_protocol(), scenario, str(seed))
        assert result.returncode == 0, f"seed {seed}: {result.stderr[-4000:]}"
