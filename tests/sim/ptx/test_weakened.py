"""Kernels with weakened PTX: a missing order is found, with the lines of both accesses."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest

from builds import LONG
from deep_ep_py.base.native import C
from deep_ep_py.errors import DeepEPError, SimtError
from deep_ep_py.tools.profile import interpreting
from interpreted import interpreted
from interpreted_calls import low_latency_calls, normal, posting
from places import CSRC
from ptx_arguments import ARGUMENTS, Argument, argument_for
from ptx_idioms import Weakened, idioms_of
from ptx_mutants import MutatedImages, RecordingImages, catch, look

pytestmark = pytest.mark.skipif(C.WARP_SIZE != 32, reason="warps have 32 threads in PTX")


Weaken = Callable[[str, str], AbstractContextManager[None]]


@pytest.fixture
def weaken() -> Iterator[Weaken]:
    """Return a context manager that replaces one text by another in all PTX interpreted meanwhile."""

    def install(before: str, after: str) -> AbstractContextManager[None]:
        return interpreted(change=lambda text: re.sub(before, after, text))

    yield install
    C.ptx.watch(False)


RACES = r"data race: .* (reads|writes) memory accessed by "
UNWRITTEN = "of shared memory is read but was never written"


@pytest.mark.parametrize(
    ("before", "after", "found"),
    [
        (r"red\.release\.sys", "red.relaxed.sys", RACES),
        (r"red\.release\.sys", "red.release.gpu", RACES),
        (r"ld\.acquire\.sys", "ld.relaxed.sys", RACES),
        (r"st\.release\.sys", "st.relaxed.sys", r"the host of rank \d reads memory accessed by a thread"),
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
        (r"red\.release\.sys", "red.relaxed.sys", RACES),
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


@pytest.mark.thorough
def test_bulk_copies_that_are_not_fenced(weaken: Weaken) -> None:
    """They would not be ordered after the initialization of the mbarrier that counts their bytes."""
    with weaken(r"fence\.proxy\.async\.shared::cta;", ""), pytest.raises((SimtError, DeepEPError), match=RACES):
        normal(4, (1,), fabric="ibgda", ranks_per_node=2)


# Lines of fabric/ibgda.h that order warps that post to one queue pair, and the NIC.
@pytest.mark.parametrize(
    ("line", "how"),
    [
        ("device::fence_release<Scope::kSystem>();  // of these WQEBBs", "left out"),
        ("device::fence_release<Scope::kSystem>();  // of these WQEBBs", "device scope"),
        ("if (filled != fenced) device::fence_release<Scope::kSystem>();", "left out"),
        ("device::store_fenced<Scope::kSystem>(here.record", "device scope"),
        ("device::fence_release<Scope::kSystem>();  // of the record", "left out"),
        ("const u64 filled = device::load_acquire<Scope::kDevice>(here.filled);", "without its acquire"),
        ("while (device::cas_acquire<Scope::kDevice>(here.ringing", "without its acquire"),
        ("known = device::cas_release<Scope::kDevice>(completed", "without its release"),
        ("const u64 before = device::load_acquire<Scope::kDevice>(filled);", "without its acquire"),
        ("const u32 tail = device::load_acquire<Scope::kSystem>(&qp.cqe->tail);", "without its acquire"),
        ("const u32 tail = device::load_acquire<Scope::kSystem>(&qp.cqe->tail);", "device scope"),
    ],
)
def test_posting_to_one_queue_pair(line: str, how: str) -> None:
    """Loads may return old values, and thus miss posted requests or find them before they are complete."""
    images = RecordingImages("sm_90a")
    symbol, _ = images.get("post", (0, 0, 0))
    text = images.texts[symbol]
    (idiom,) = {idiom for _, idiom in idioms_of(text) if idiom.text.startswith(line)}
    mutated = MutatedImages(images, Weakened(idiom, how))
    with interpreting(mutated), pytest.raises((SimtError, DeepEPError, AssertionError)):
        posting(range(1, 200))
    C.ptx.watch(False)


@pytest.mark.skipif(not LONG, reason="half an hour: DEEP_EP_LONG=1")
@pytest.mark.timeout(2 * 3600)
def test_every_line_that_orders_memory() -> None:
    """Each line, weakened by one step, is noticed, or there is an argument why it need not be."""
    images = RecordingImages("sm_90a")
    found = look(images)
    missed = [mutant for mutant in found.mutants() if not catch(images, found, mutant, seconds=2.0)]
    C.ptx.watch(False)
    assert not [str(mutant) for mutant in missed if not argument_for(mutant)]


@pytest.mark.parametrize("argument", ARGUMENTS, ids=lambda argument: f"{argument.how}, {argument.text[:60]}")
def test_arguments_are_about_lines_that_exist(argument: Argument) -> None:
    lines = [line.strip().removeprefix("DEEP_EP_DEVICE ") for line in (CSRC / argument.file).read_text().splitlines()]
    assert any(line.startswith(argument.text) for line in lines)
