"""Races, and orders that suffice: accesses of a thread that are not ordered after those of another."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from deep_ep_py.base.native import C
from deep_ep_py.errors import SimtError
from ptx_programs import entry, run, words

pytestmark = pytest.mark.skipif(C.WARP_SIZE != 32, reason="warps have 32 threads in PTX")

SHARED = ".extern .shared .align 128 .b8 dynamic[];\n"
# Thread 0 of the first block writes data, then a flag; thread 0 of the last block waits for the flag and reads.
MESSAGE = """
    ld.param.u64 %rd0, [main_0];
    mov.u32 %r1, %tid.x;
    setp.ne.s32 %p1, %r1, 0;
    @%p1 bra $L_end;
    mov.u32 %r2, %ctaid.x;
    setp.ne.s32 %p2, %r2, 0;
    @%p2 bra $L_read;
    .loc 1 10 1
    st.global.u64 [%rd0], 7;
    STORE
    bra $L_end;
$L_read:
    LOAD
    setp.eq.s32 %p3, %r3, 0;
    @%p3 bra $L_read;
    .loc 1 20 1
    ld.global.u64 %rd1, [%rd0];
$L_end:
"""


@pytest.fixture(autouse=True)
def watched() -> Iterator[None]:
    C.ptx.watch(True)
    yield
    C.ptx.watch(False)


def message(store: str, load: str) -> str:
    return entry(MESSAGE.replace("STORE", store).replace("LOAD", load), parameters=1)


@pytest.mark.parametrize("scope", ["gpu", "sys"])
@pytest.mark.parametrize("store", ["st.release.{0}.b32 [%rd0+8], 1;", "atom.release.{0}.add.u32 %r4, [%rd0+8], 1;"])
@pytest.mark.parametrize("load", ["ld.acquire.{0}.b32 %r3, [%rd0+8];", "atom.acq_rel.{0}.cas.b32 %r3, [%rd0+8], 5, 6;"])
def test_a_message_that_is_released_and_acquired(scope: str, store: str, load: str) -> None:
    run(message(store.format(scope), load.format(scope)), words(2), blocks=2)


RELEASE, ACQUIRE = "st.release.gpu.b32 [%rd0+8], 1;", "ld.acquire.gpu.b32 %r3, [%rd0+8];"


@pytest.mark.parametrize(
    ("store", "load"),
    [
        ("st.relaxed.gpu.b32 [%rd0+8], 1;", ACQUIRE),
        (RELEASE, "ld.relaxed.gpu.b32 %r3, [%rd0+8];"),
        ("st.release.gpu.b32 [%rd0+8], 1;\nst.relaxed.gpu.b32 [%rd0+8], 2;", ACQUIRE),
        ("atom.relaxed.gpu.add.u32 %r4, [%rd0+8], 1;", ACQUIRE),
    ],
)
def test_a_message_that_is_not(store: str, load: str) -> None:
    with pytest.raises(
        SimtError, match=r"data race: it reads memory accessed by .* at kernel\.cu:10 .*kernel\.cu:20\)"
    ):
        for _ in range(20):  # the flag may be read before the second store
            run(message(store, load), words(2), blocks=2)


@pytest.mark.parametrize(
    ("store", "load"),
    [
        ("st.release.cta.b32 [%rd0+8], 1;", "ld.acquire.cta.b32 %r3, [%rd0+8];"),
        ("st.release.gpu.b32 [%rd0+8], 1;", "ld.acquire.cta.b32 %r3, [%rd0+8];"),
        ("st.global.u32 [%rd0+8], 1;", ACQUIRE),
    ],
)
def test_a_flag_whose_scopes_are_too_narrow(store: str, load: str) -> None:
    """The threads are in different blocks; a weak store races with any load of the flag."""
    with pytest.raises(SimtError, match="data race"):
        run(message(store, load), words(2), blocks=2)


def test_what_updates_leave_in_place() -> None:
    """A thread that reads the sum acquires what both adders have released."""
    body = """
    ld.param.u64 %rd0, [main_0];
    mov.u32 %r1, %tid.x;
    setp.ne.s32 %p1, %r1, 0;
    @%p1 bra $L_end;
    mov.u32 %r2, %ctaid.x;
    setp.eq.s32 %p2, %r2, 2;
    @%p2 bra $L_read;
    mul.wide.u32 %rd2, %r2, 8;
    add.s64 %rd3, %rd0, %rd2;
    st.global.u64 [%rd3+16], 7;
    atom.ORDER.gpu.add.u32 %r4, [%rd0], 1;
    bra $L_end;
$L_read:
    ld.acquire.gpu.b32 %r3, [%rd0];
    setp.lt.u32 %p3, %r3, 2;
    @%p3 bra $L_read;
    ld.global.u64 %rd1, [%rd0+16];
    ld.global.u64 %rd4, [%rd0+24];
$L_end:
    """
    run(entry(body.replace("ORDER", "release"), parameters=1), words(4), blocks=3)
    with pytest.raises(SimtError, match="data race"):
        run(entry(body.replace("ORDER", "relaxed"), parameters=1), words(4), blocks=3)


NEIGHBOURS = """
    mov.u32 %r1, %tid.x;
    shl.b32 %r2, %r1, 2;
    mov.u32 %r3, dynamic;
    add.s32 %r4, %r3, %r2;
    st.shared.u32 [%r4], %r1;
    MEET
    xor.b32 %r5, %r2, DISTANCE;
    add.s32 %r6, %r3, %r5;
    ld.shared.u32 %r7, [%r6];
"""


@pytest.mark.parametrize(
    ("meet", "distance", "races"),
    [
        ("bar.warp.sync -1;", 4, False),
        ("bar.warp.sync -1;", 128, True),
        ("bar.sync 0;", 128, False),
        ("", 4, True),
        ("vote.sync.any.pred %p1, 1, -1;", 4, True),  # orders no memory accesses
    ],
)
def test_threads_that_meet(meet: str, distance: int, races: bool) -> None:
    meet = "setp.eq.s32 %p1, %r1, 0;\n" + meet.replace(" 1, -1", " %p1, -1")
    text = entry(NEIGHBOURS.replace("MEET", meet).replace("DISTANCE", str(distance)), SHARED, parameters=0)
    if not races:
        run(text, threads=64, shared_bytes=256)
        return
    with pytest.raises(SimtError, match="data race|was never written"):
        run(text, threads=64, shared_bytes=256)


def test_bytes_of_a_word_are_told_apart() -> None:
    body = """
    ld.param.u64 %rd0, [main_0];
    mov.u32 %r1, %tid.x;
    cvt.u64.u32 %rd1, %r1;
    add.s64 %rd2, %rd0, %rd1;
    mov.u16 %rs1, 5;
    st.global.u8 [%rd2], %rs1;
    """
    run(entry(body, parameters=1), words(4))
    with pytest.raises(SimtError, match="data race"):
        run(entry(body.replace("cvt.u64.u32 %rd1, %r1;", "mov.u64 %rd1, 3;"), parameters=1), words(4))


COPY = """
    mov.u32 %r1, %tid.x;
    setp.ne.s32 %p1, %r1, 0;
    @%p1 bra $L_end;
    ld.param.u64 %rd0, [main_0];
    mov.u32 %r2, dynamic;
    st.shared.v2.u64 [%r2], {7, 8};
    FENCE
    cp.async.bulk.global.shared::cta.bulk_group [%rd0], [%r2], 16;
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group.read 0;
    st.shared.u64 [%r2], 9;
    WAIT
    ld.global.u64 %rd1, [%rd0];
    cp.async.bulk.wait_group 0;
$L_end:
"""


@pytest.mark.parametrize(
    ("fence", "wait", "races"),
    [
        ("fence.proxy.async;", "cp.async.bulk.wait_group 0;", False),
        ("", "cp.async.bulk.wait_group 0;", True),
        ("fence.proxy.async;", "", True),
    ],
)
def test_bulk_copies_have_a_proxy_of_their_own(fence: str, wait: str, races: bool) -> None:
    """They see the writes of their thread only after a fence, and the thread sees theirs only after a wait."""
    memory = words(2)
    text = entry(COPY.replace("FENCE", fence).replace("WAIT", wait), SHARED, parameters=1)
    if races:
        with pytest.raises(SimtError, match="data race"):
            run(text, memory, shared_bytes=64)
    else:
        run(text, memory, shared_bytes=64)
        assert [*memory] == [7, 8]


# Only the first thread of each block continues; %r9 is its block.
FIRST_THREADS = """
    ld.param.u64 %rd0, [main_0];
    mov.u32 %r1, %tid.x;
    setp.ne.s32 %p1, %r1, 0;
    @%p1 bra $L_end;
    mov.u32 %r9, %ctaid.x;
"""
# Thread 0 of the first block does A, then signals thread 0 of the second, which does B; the signal orders nothing.
TOLD = f"""{FIRST_THREADS}\
    setp.ne.s32 %p2, %r9, 0;
    @%p2 bra $L_one;
    A
    st.relaxed.gpu.b32 [%rd0+64], 1;
    bra $L_end;
$L_one:
    ld.relaxed.gpu.b32 %r3, [%rd0+64];
    setp.eq.s32 %p3, %r3, 0;
    @%p3 bra $L_one;
    B
$L_end:
"""


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("ld.relaxed.gpu.b32 %r5, [%rd0];", "st.relaxed.gpu.b32 [%rd0], 4;\n st.global.u32 [%rd0], 5;"),
        (
            "atom.relaxed.gpu.add.u32 %r5, [%rd0], 1;",
            "atom.relaxed.gpu.add.u32 %r6, [%rd0], 1;\n ld.global.u32 %r7, [%rd0];",
        ),
        (
            "atom.release.gpu.add.u32 %r5, [%rd0], 1;",
            "atom.release.gpu.add.u32 %r6, [%rd0], 1;\n st.global.u32 [%rd0], 0;",
        ),
        ("st.global.u32 [%rd0], 3;\n st.relaxed.gpu.b32 [%rd0], 4;", "ld.relaxed.gpu.b32 %r5, [%rd0];"),
    ],
)
def test_a_strong_access_hides_no_other(first: str, second: str) -> None:
    """An access that may be unordered with it may still have to be ordered after an earlier weak access."""
    text = TOLD.replace("A\n", first + "\n", 1).replace("B\n", second + "\n", 1)
    with pytest.raises(SimtError, match="data race"):
        run(entry(text, parameters=1), words(10), blocks=2)


# Block 0 stores 1. Block 1 sees it and signals with a release that 2 and 3 acquire: none of them may read 0.
COHERENT = f"""{FIRST_THREADS}\
    setp.eq.s32 %p2, %r9, 1;
    @%p2 bra $L_1;
    setp.gt.u32 %p2, %r9, 1;
    @%p2 bra $L_2;
    st.relaxed.gpu.b32 [%rd0], 1;
    bra $L_end;
$L_1:
    ld.relaxed.gpu.b32 %r3, [%rd0];
    setp.eq.s32 %p3, %r3, 0;
    @%p3 bra $L_1;
    st.release.gpu.b32 [%rd0+16], 1;
    bra $L_end;
$L_2:
    ld.acquire.gpu.b32 %r3, [%rd0+16];
    setp.eq.s32 %p3, %r3, 0;
    @%p3 bra $L_2;
    ld.relaxed.gpu.b32 %r4, [%rd0];
    mul.wide.u32 %rd2, %r9, 16;
    add.s64 %rd3, %rd0, %rd2;
    st.global.u32 [%rd3], %r4;
$L_end:
"""


def test_coherence() -> None:
    for seed in range(1, 40):
        C.ptx.watch(True, seed=seed)
        memory = words(8)
        run(entry(COHERENT, parameters=1), memory, blocks=4)
        assert (memory[4] & 0xFFFFFFFF, memory[6] & 0xFFFFFFFF) == (1, 1), seed


def test_old_values() -> None:
    """A load may return an old value, but the next load of that thread may not return an older one."""
    body = f"""{FIRST_THREADS}\
    setp.ne.s32 %p2, %r9, 0;
    @%p2 bra $L_read;
    st.relaxed.gpu.b32 [%rd0], 1;
    st.relaxed.gpu.b32 [%rd0], 2;
    st.relaxed.gpu.b32 [%rd0+8], 1;
    bra $L_end;
$L_read:
    ld.relaxed.gpu.b32 %r3, [%rd0+8];
    setp.eq.s32 %p3, %r3, 0;
    @%p3 bra $L_read;
    ld.relaxed.gpu.b32 %r4, [%rd0];
    ld.relaxed.gpu.b32 %r5, [%rd0];
    st.global.u32 [%rd0+16], %r4;
    st.global.u32 [%rd0+24], %r5;
$L_end:
    """
    seen = set()
    for seed in range(1, 60):
        C.ptx.watch(True, seed=seed)
        memory = words(4)
        run(entry(body, parameters=1), memory, blocks=2)
        seen.add((memory[2], memory[3]))
    assert {(0, 2), (1, 2), (2, 2)} <= seen
    assert all(first <= second for first, second in seen)
