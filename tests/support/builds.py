"""What the tests know about the build under test: its name and how much of each suite it can afford."""

from __future__ import annotations

import os
from typing import Any

import pytest

BUILD = os.environ.get("DEEP_EP_BUILD", "fast")
SANITIZED = BUILD in ("tsan", "asan")

# Set by `make test-long`: tests that try random moments make hundreds of trials, and the soak runs.
LONG = bool(os.environ.get("DEEP_EP_LONG"))

# Set by `make test-fast`: few schedules and examples.
QUICK = bool(os.environ.get("DEEP_EP_QUICK"))


def _tries(count: int) -> int:
    if LONG:
        return 5 * count
    return max(1, count // 4) if QUICK else count


# Every named case runs under all schedules and block counts where values are tested. In the fast build, where a warp is
# a single fiber, most orders cannot occur. The sanitizers check each access, which costs ten times as much, and find a
# race in (nearly) any schedule.
SCHEDULES = _tries({"fast": 3, "exact": 2, "tsan": 2, "asan": 1}[BUILD])
BLOCK_COUNTS = {"fast": (1, 2, 5), "exact": (1, 2, 5), "tsan": (2,), "asan": (2,)}[BUILD]
# Whether an access is within its owner's memory does not depend on the order in which puts arrive.
FABRICS = ("peer", "ibgda") if BUILD == "asan" else ("peer", "proxy", "ibgda")

# Schedules of a protocol test, and examples of a hypothesis test.
PROTOCOL_SCHEDULES = _tries({"fast": 2, "exact": 2, "tsan": 2, "asan": 1}[BUILD])
EXAMPLES = _tries({"fast": 100, "exact": 25, "tsan": 8, "asan": 8}[BUILD])


def schedules(count: int = SCHEDULES) -> range:
    """Return the seeds of `count` random schedules. They begin at 1, because seed 0 means first in, first out."""
    return range(1, count + 1)


def in_long(*values: Any) -> Any:
    """Mark parameter values that differ little from their neighbors: only `make test-long` runs them."""
    return pytest.param(*values, marks=pytest.mark.skipif(not LONG, reason="like its neighbors: `make test-long`"))


INTERPRETED = "DEEP_EP_TEST_PTX"
"""Name of an environment variable. If it is set, kernels run as the PTX that NVRTC generates, interpreted."""
