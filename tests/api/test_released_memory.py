"""The memory of dropped outputs goes back to the system."""

from __future__ import annotations

import pytest

from worker_runs import lines_of


@pytest.mark.slow
@pytest.mark.once
def test_dropped_outputs_leave_memory() -> None:
    """It falls to what is used, which the worker asserts together with all results; here the order of magnitude."""
    (report,) = lines_of("released_outputs.py", seconds=120)
    assert report["before"] > 60 << 20 and report["after"] < 6 << 20, report
    assert report["arena_returned"] >= report["before"] - report["after"] - (2 << 20), report
