"""Violations of the rules by a program are found and reported with their line."""

from __future__ import annotations

import pytest

from deep_ep_py.base.native import C
from deep_ep_py.errors import SimtError
from ptx_programs import HEAD, entry, run, words

pytestmark = pytest.mark.skipif(C.WARP_SIZE != 32, reason="warps have 32 threads in PTX")

LOC = ".loc 1 42 7\n"
SHARED = ".extern .shared .align 128 .b8 dynamic[];\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (entry("add.s8 %r1, 1, 2;"), r"line \d+: add.s8 is not supported"),
        (entry("ld.relaxed.gpu.v8.b32 %r1, [%rd1];"), "ld.relaxed.gpu.v8.b32 is not supported"),
        (entry("fence.sc.sys;"), "fence.sc.sys is not supported"),
        (entry("mov.u32 %r1, %clock;"), "%clock is not declared, before this"),
        (entry("bra $L_nowhere;"), r"main: no label is named \$L_nowhere"),
        (entry("mov.u32 %r77, 1;"), "%r77 is not declared, before this"),
        (HEAD + ".maxnreg 3;", "line 5: .maxnreg is not supported"),
        (entry("mov.u32 %r1, 1"), "expected ',' or ';', found 'ret'"),
        (HEAD + ".entry main()\n{\n", "expected '}', found the end"),
    ],
)
def test_what_is_not_known_is_refused(text: str, message: str) -> None:
    with pytest.raises(C.ptx.PtxError, match=message):
        C.ptx.Image(text)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("add.s32 %r1, %r2, 1;", "a register is read but was never written"),
        ("mov.u32 %r1, dynamic;\nld.shared.u32 %r2, [%r1+4];", "byte 4 of shared memory is read but was never written"),
        ("mov.u32 %r1, dynamic;\nst.shared.u32 [%r1+256], 0;", "byte 256 of shared memory is accessed, of 256"),
        ("ld.global.u32 %r1, [8];", "address 8 is accessed"),
        ("ld.param.u64 %rd0, [main_0];\nld.global.u32 %r1, [%rd0+2];", "is not a multiple of 4"),
        ("mov.u32 %r1, 0;\nrem.u32 %r2, 1, %r1;", "it divides by 0"),
    ],
)
def test_a_thread_that_breaks_a_rule(body: str, message: str) -> None:
    memory = words(2)
    with pytest.raises(SimtError) as info:
        run(entry(LOC + body, SHARED, parameters=1), memory, shared_bytes=256)
    assert message in str(info.value) and "kernel.cu:42)" in str(info.value), info.value


def test_threads_of_a_warp_at_different_barriers() -> None:
    body = """
    mov.u32 %r1, %tid.x;
    setp.lt.u32 %p1, %r1, 16;
    .loc 1 10 1
    @%p1 bra $L_other;
    bar.sync 0;
    bra $L_end;
$L_other:
    .loc 1 20 1
    bar.sync 0;
$L_end:
    """
    with pytest.raises(SimtError, match=r"threads of a warp come to different aligned barriers .*kernel.cu:[12]0\)"):
        run(entry(body, parameters=0))


def test_a_shuffle_whose_mask_lacks_the_thread_itself() -> None:
    with pytest.raises(SimtError, match=r"kernel\.cu:42"):
        run(entry(LOC + "shfl.sync.idx.b32 %r1|%p1, 1, 0, 31, 0xffff;", parameters=0))


WAIT = """\
$L_wait:
    mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r1], 0;
    @!%p1 bra $L_wait;
"""
BULK = f"""
    .shared .align 8 .b8 barrier[8];
    mov.u32 %r3, %tid.x;
    setp.ne.s32 %p2, %r3, 0;
    @%p2 bra $L_end;
    ld.param.u64 %rd0, [main_0];
    mov.u32 %r1, barrier;
    mov.u32 %r2, dynamic;
    mbarrier.init.shared::cta.b64 [%r1], 1;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1], 32;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%rd0], 32, [%r1];
{WAIT}
    ld.shared.u64 %rd1, [%r2+24];
    fence.proxy.async;
    cp.async.bulk.global.shared::cta.bulk_group [%rd0+32], [%r2], 32;
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group 0;
$L_end:
"""


@pytest.mark.parametrize(
    ("left_out", "message"),
    [
        ("", ""),
        (WAIT, "byte 152 of shared memory is read but was never written"),
        ("cp.async.bulk.wait_group 0;\n", "it ends before its bulk copies have been waited for"),
        ("mbarrier.init.shared::cta.b64 [%r1], 1;\n", "there is no mbarrier at this address"),
        ("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1], 32;\n", "a phase of an mbarrier that never ends"),
    ],
)
def test_bulk_copies(left_out: str, message: str) -> None:
    memory = words(8, range(8))
    text = entry(BULK.replace(left_out, ""), SHARED, parameters=1)
    if message:
        with pytest.raises(SimtError, match=message):
            run(text, memory, shared_bytes=64)
    else:
        run(text, memory, shared_bytes=64)
        assert [*memory] == [0, 1, 2, 3] * 2
