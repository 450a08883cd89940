"""What the tests know about the build under test: its name and how much of each suite it can afford."""

from __future__ import annotations

import os
from typing import Any

import pytest

BUILD = os.environ.get("DEEP_EP_BUILD", "fast")
SANITIZED = BUILD in ("tsan", "asan")

# `make test-long` sets it: what is tried at random moments is tried hundreds of times, and the soak runs.
LONG = bool(os.environ.get("DEEP_EP_LONG"))

# `make test-fast` sets it: a few schedules and examples.
QUICK = bool(os.environ.get("DEEP_EP_QUICK"))


def _tries(count: int) -> int:
    if LONG:
        return 5 * count
    return max(1, count // 4) if QUICK else count


# Every named case runs all schedules and block counts where values are what is tested; the sanitizers look at
# each access, which costs ten times as much, and see a race in (nearly) any schedule.
SCHEDULES = _tries({"fast": 6, "exact": 2, "tsan": 2, "asan": 1}[BUILD])
BLOCK_COUNTS = {"fast": (1, 2, 5), "exact": (1, 2, 5), "tsan": (2,), "asan": (2,)}[BUILD]
# What of memory is another's does not depend on the order in which puts arrive.
FABRICS = ("peer", "ibgda") if BUILD == "asan" else ("peer", "proxy", "ibgda")

# Schedules of a protocol test, and examples of a hypothesis test.
# Orders are found in the other builds: in the fast one a warp is a fiber.
PROTOCOL_SCHEDULES = _tries({"fast": 4, "exact": 2, "tsan": 2, "asan": 1}[BUILD])
EXAMPLES = _tries({"fast": 100, "exact": 25, "tsan": 8, "asan": 8}[BUILD])


def schedules(count: int = SCHEDULES) -> range:
    """Seeds of `count` random schedules. Seed 0 means first in, first out, so they begin at 1."""
    return range(1, count + 1)


def in_long(*values: Any) -> Any:
    """Values of parameters that are much like their neighbours: `make test-long` alone runs them."""
    return pytest.param(*values, marks=pytest.mark.skipif(not LONG, reason="like its neighbours: in `make test-long`"))


INTERPRETED = "DEEP_EP_TEST_PTX"
"""Names a variable of the environment. Where it is set, kernels are the PTX that NVRTC makes of them, interpreted."""
