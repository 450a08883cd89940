"""P12, P14 to P16: the consequences of a failure, in scenarios without Python (tests/native/protocol), where user
kernels overwrite published rows after operations that fail."""

from __future__ import annotations

import re

import pytest

from builds import BUILD
from mutants.mutant import BOUNDS, ORDERED, RACING, REPLAYS
from native_programs import build_protocol, run

SEEDS = range(1, {"fast": 8, "exact": 3, "tsan": 3, "asan": 2}[BUILD] + 1)
FEW_SEEDS = SEEDS[: {"fast": 3, "exact": 2, "tsan": 1, "asan": 1}[BUILD]]


@pytest.mark.parametrize("scenario", (*ORDERED, *REPLAYS, *(() if BUILD == "tsan" else RACING)))
@pytest.mark.scenarios
def test_what_follows_a_failure(scenario: str) -> None:
    """Every call that ends without a failure has the right sums on all ranks; no rank waits until its own timeout."""
    for seed in SEEDS:
        result = run(build_protocol(), scenario, str(seed))
        assert result.returncode == 0, f"seed {seed}\n{result.stderr}"


@pytest.mark.parametrize("scenario", BOUNDS)
@pytest.mark.scenarios
def test_what_is_read_is_bounded(scenario: str) -> None:
    """Overwritten plans, heaps that end early: the rank that reads them reports it, and nothing else is
    written."""
    for seed in FEW_SEEDS:
        result = run(build_protocol(), scenario, str(seed))
        assert result.returncode == 0, f"seed {seed}\n{result.stderr}"


@pytest.mark.scenarios
def test_an_operation_that_fails_on_one_rank_ends_well_on_another() -> None:
    """This must occur: otherwise the scenario proves nothing about the order of the last look."""
    both = 0
    for seed in SEEDS:
        said = re.search(r"(\d+) did both", run(build_protocol(), "failing, ordered", str(seed)).stdout)
        both += int(said[1]) if said else 0
    assert both > 0
