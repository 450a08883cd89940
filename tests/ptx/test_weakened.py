"""Kernels whose PTX has been weakened: an order that is missing is found, with the lines of both accesses."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest

from deep_ep_py.core.native import C
from deep_ep_py.errors import DeepEPError, SimtError
from interpreted import interpreted
from interpreted_calls import low_latency_calls, normal

pytestmark = pytest.mark.skipif(C.WARP_SIZE != 32, reason="warps have 32 threads in PTX")


Weaken = Callable[[str, str], AbstractContextManager[None]]


@pytest.fixture
def weaken() -> Iterator[Weaken]:
    """What replaces one text by another in all PTX that is interpreted meanwhile."""

    def install(before: str, after: str) -> AbstractContextManager[None]:
        return interpreted(change=lambda text: re.sub(before, after, text))

    yield install
    C.ptx.watch(False)


RACES = r"it races: .* (reads|writes) what is used by "
UNWRITTEN = "of shared memory is read and was not written"


@pytest.mark.parametrize(
    ("before", "after", "found"),
    [
        (r"atom\.release\.sys", "atom.relaxed.sys", RACES),
        (r"atom\.release\.sys", "atom.release.gpu", RACES),
        (r"ld\.acquire\.sys", "ld.relaxed.sys", RACES),
        (r"st\.release\.sys", "st.relaxed.sys", r"the host of rank \d reads what is used by a thread"),
        (r"ld\.acquire\.sys", "ld.acquire.gpu", RACES),
        (r"atom\.acq_rel\.gpu", "atom.relaxed.gpu", RACES),
        (r"atom\.acq_rel\.gpu", "atom.acq_rel.cta", RACES),
        (r"bar\.warp\.sync\s+-1;", "", RACES),
        (r"bar\.sync\s+0;", "", f"{RACES}|{UNWRITTEN}"),
        (r"cp\.async\.bulk\.wait_group 0;", "", "ends before its bulk copies have been waited for"),
        (
            r"cp\.async\.bulk\.wait_group 0;",
            "cp.async.bulk.wait_group.read 0;",
            "ends before its bulk copies have been",
        ),
    ],
)
def test_normal_mode(weaken: Weaken, before: str, after: str, found: str) -> None:
    with weaken(before, after), pytest.raises((SimtError, DeepEPError), match=found):
        normal(2, (1,))


@pytest.mark.parametrize(
    ("before", "after", "found"),
    [
        (r"atom\.release\.sys", "atom.relaxed.sys", RACES),
        (r"ld\.acquire\.sys", "ld.acquire.gpu", RACES),
        (r"bar\.warp\.sync\s+-1;", "", f"{RACES}|{UNWRITTEN}"),
    ],
)
def test_low_latency_mode(weaken: Weaken, before: str, after: str, found: str) -> None:
    with weaken(before, after), pytest.raises((SimtError, DeepEPError), match=found):
        low_latency_calls(2, (1,))


def test_a_stage_that_is_used_again_before_it_was_read(weaken: Weaken) -> None:
    with weaken(r"cp\.async\.bulk\.wait_group\.read 1;", ""), pytest.raises((SimtError, DeepEPError), match=RACES):
        normal(2, (1,))


def test_bulk_copies_that_are_not_fenced(weaken: Weaken) -> None:
    """They would not come after the initialisation of the barrier that tells of their bytes."""
    with weaken(r"fence\.proxy\.async;", ""), pytest.raises((SimtError, DeepEPError), match=RACES):
        normal(4, (1,), fabric="ibgda", ranks_per_node=2)
