"""The order of bulk copies, and of the mbarriers that signal them: which errors are found, and what is legal."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from deep_ep_py.base.native import C
from deep_ep_py.errors import SimtError
from ptx_programs import entry, run, words

pytestmark = pytest.mark.skipif(C.WARP_SIZE != 32, reason="warps have 32 threads in PTX")

SHARED = ".extern .shared .align 128 .b8 dynamic[];\n"
BEGIN = """
    mov.u32 %r1, %tid.x;
    setp.ne.s32 %p1, %r1, 0;
    @%p1 bra $L_end;
    ld.param.u64 %rd0, [main_0];
    mov.u32 %r2, dynamic;
    add.s32 %r3, %r2, 64;
"""
LOAD = """
    mbarrier.init.shared::cta.b64 [%r3], 1;
    fence.proxy.async;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r3], 16;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%rd0], 16, [%r3];
"""
AWAIT_LOAD = """
$L_wait:
    mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r3], 0;
    @!%p2 bra $L_wait;
"""
WRITE_STAGE = """
    st.shared.v2.u64 [%r2], {7, 8};
    fence.proxy.async;
"""
STORE = """
    cp.async.bulk.global.shared::cta.bulk_group [%rd0], [%r2], 16;
    cp.async.bulk.commit_group;
"""
AWAIT_STORES, AWAIT_READS = "cp.async.bulk.wait_group 0;\n", "cp.async.bulk.wait_group.read 0;\n"
END = "$L_end:\n"
RACES = "data race: it (reads|writes) memory accessed by a thread"


@pytest.fixture(autouse=True)
def watched() -> Iterator[None]:
    C.ptx.watch(True)
    yield
    C.ptx.watch(False)


def execute(*parts: str) -> None:
    run(entry("".join((BEGIN, *parts, END)), SHARED, parameters=1), words(4), shared_bytes=128)


def test_a_load_that_is_waited_for() -> None:
    execute(LOAD, AWAIT_LOAD, "st.global.u64 [%rd0], 5;\nst.shared.u64 [%r2], 5;\n")


def test_a_load_that_is_not() -> None:
    with pytest.raises(SimtError, match="ends before bulk copies into its shared memory have been waited for"):
        execute(LOAD)


@pytest.mark.parametrize("wait", ["", AWAIT_STORES, AWAIT_READS])
@pytest.mark.parametrize("write", ["st.global.u64 [%rd0], 5;\n", "st.shared.u64 [%r2], 5;\n"])
def test_loads_are_in_no_group(wait: str, write: str) -> None:
    """Waiting for stores does not cover loads."""
    with pytest.raises(SimtError, match=RACES):
        execute(LOAD, wait, write, AWAIT_LOAD)


def test_a_fence_after_a_store_does_not_order_it() -> None:
    execute(WRITE_STAGE, STORE, AWAIT_READS, "st.shared.u64 [%r2], 9;\n", AWAIT_STORES)
    with pytest.raises(SimtError, match=RACES):
        execute(WRITE_STAGE, STORE, "st.shared.u64 [%r2], 9;\nfence.proxy.async;\n", AWAIT_STORES)


@pytest.mark.parametrize("wait", ["", AWAIT_READS, AWAIT_STORES])
def test_copies_of_a_thread_are_in_no_order(wait: str) -> None:
    """Two stores to one place race unless the first has been waited for completely, not only for its read."""
    if wait == AWAIT_STORES:
        execute(WRITE_STAGE, STORE, wait, STORE, AWAIT_STORES)
        return
    with pytest.raises(SimtError, match=RACES):
        execute(WRITE_STAGE, STORE, wait, STORE, AWAIT_STORES)


@pytest.mark.parametrize("wait", ["", AWAIT_READS])
def test_a_stage_that_is_loaded_again(wait: str) -> None:
    """A load must not overwrite a stage that a store may still read."""
    if wait:
        execute(WRITE_STAGE, STORE.replace("[%rd0]", "[%rd0+16]"), wait, LOAD, AWAIT_LOAD, AWAIT_STORES)
        return
    with pytest.raises(SimtError, match=RACES):
        execute(WRITE_STAGE, STORE.replace("[%rd0]", "[%rd0+16]"), LOAD, AWAIT_LOAD, AWAIT_STORES)


def test_a_barrier_that_others_use_behind_nothing() -> None:
    """Its initialization must be ordered before, whichever happens first."""
    body = """
    mov.u32 %r1, %tid.x;
    mov.u32 %r3, dynamic;
    setp.ne.s32 %p1, %r1, 0;
    @%p1 bra $L_others;
    mbarrier.init.shared::cta.b64 [%r3], 2;
    ORDER
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r3], 0;
    bra $L_end;
$L_others:
    ORDER
    setp.ne.s32 %p2, %r1, 32;
    @%p2 bra $L_end;
    nanosleep.u32 1000;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r3], 0;
$L_end:
    """
    run(
        entry(body.replace("ORDER", "barrier.cta.red.or.pred %p3, 0, %p1;"), SHARED, parameters=0),
        threads=64,
        shared_bytes=64,
    )
    with pytest.raises(SimtError, match=f"{RACES}|there is no mbarrier"):
        run(entry(body.replace("ORDER", ""), SHARED, parameters=0), threads=64, shared_bytes=64)


@pytest.mark.parametrize("space", ["global", "shared::cta"])
@pytest.mark.parametrize(
    ("before", "copy", "needed"),
    [
        ("st.shared.v2.u64 [%r2], {7, 8};\nFENCE", STORE + AWAIT_STORES, "shared::cta"),
        ("fence.proxy.async;\nst.shared.v2.u64 [%r2], {7, 8};\nfence.proxy.async.shared::cta;\n"
         "st.global.u64 [%rd0], 5;\nFENCE", STORE + AWAIT_STORES, "global"),
        ("st.global.u64 [%rd0], 5;\nmbarrier.init.shared::cta.b64 [%r3], 1;\n"
         "fence.proxy.async.shared::cta;\nFENCE", "".join(LOAD.splitlines(True)[3:]) + AWAIT_LOAD, "global"),
        ("mbarrier.init.shared::cta.b64 [%r3], 1;\nFENCE", "".join(LOAD.splitlines(True)[3:]) + AWAIT_LOAD,
         "shared::cta"),
    ],
    ids=["a store reads its stage", "a store writes", "a load reads", "a load uses its barrier"],
)  # fmt: skip
def test_a_fence_orders_one_space(space: str, before: str, copy: str, needed: str) -> None:
    parts = before.replace("FENCE", f"fence.proxy.async.{space};\n"), copy
    if space == needed:
        execute(*parts)
        return
    with pytest.raises(SimtError, match="data race"):
        execute(*parts)
