"""The effect of each instruction, against the PTX ISA."""

from __future__ import annotations

import struct

import pytest

from deep_ep_py.base.native import C
from ptx_programs import entry, run, words

pytestmark = pytest.mark.skipif(C.WARP_SIZE != 32, reason="warps have 32 threads in PTX")


def f32(value: float) -> str:
    return f"0f{struct.unpack('<I', struct.pack('<f', value))[0]:08x}"


def bits(value: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


M = 0xFFFFFFFF
RESULTS = [
    ("add.s32 %r0, 5, -7;", -2 & M),
    ("add.s64 %rd9, 1, -3;", -2 & (M << 32 | M)),
    ("sub.s32 %r0, 0x80000000, 1;", 0x7FFFFFFF),
    ("mul.lo.s32 %r0, -3, 5;", -15 & M),
    ("mul.wide.u32 %rd9, 0xffffffff, 0xffffffff;", M * M),
    ("mul.wide.s32 %rd9, -2, 3;", -6 & (M << 32 | M)),
    ("mul.hi.u32 %r0, 0x80000000, 6;", 3),
    ("mad.lo.s32 %r0, 7, 6, -2;", 40),
    ("div.u32 %r0, 0xffffffff, 10;", M // 10),
    ("rem.u32 %r0, 0xffffffff, 10;", M % 10),
    ("min.u32 %r0, 1, 0xffffffff;", 1),
    ("max.u64 %rd9, 1, 3;", 3),
    ("neg.s64 %rd9, 1;", M << 32 | M),
    ("not.b32 %r0, 0xf0;", 0xFFFFFF0F),
    ("shl.b32 %r0, 1, 31;", 1 << 31),
    ("shl.b32 %r0, 1, 32;", 0),
    ("shl.b64 %rd9, 1, 40;", 1 << 40),
    ("shr.u32 %r0, 0x80000000, 31;", 1),
    ("shr.u32 %r0, 0x80000000, 40;", 0),
    ("shr.s64 %rd9, 0x8000000000000000, 70;", M << 32 | M),
    ("bfi.b32 %r0, 0xabc, 0xffffffff, 8, 8;", 0xFFFFBCFF),
    ("bfi.b64 %rd9, 3, 0, 32, 32;", 3 << 32),
    ("bfi.b32 %r0, 3, 5, 40, 8;", 5),
    ("bfind.shiftamt.u32 %r0, 0x00800000;", 8),
    ("bfind.shiftamt.u32 %r0, 0;", M),
    ("brev.b32 %r0, 1;", 1 << 31),
    ("popc.b32 %r0, 0xf0f00001;", 9),
    ("prmt.b32 %r0, 0x33221100, 0x77665544, 0x7531;", 0x77553311),
    ("prmt.b32 %r0, 0x80, 0, 0x8888;", M),
    ("setp.lt.s32 %p0, -1, 0; selp.b32 %r0, 7, 8, %p0;", 7),
    ("setp.lt.u32 %p0, -1, 0; selp.b32 %r0, 7, 8, %p0;", 8),
    ("setp.eq.s16 %p0, 3, 3; selp.b32 %r0, 7, 8, !%p0;", 8),
    ("mov.pred %p0, -1; not.pred %p1, %p0; selp.u32 %r0, 1, 0, %p1;", 0),
    ("mov.u32 %r1, 9; mov.u32 %r2, 5; mov.b64 %rd9, {%r1, %r2};", 5 << 32 | 9),
    ("mov.u64 %rd1, 0x500000009; mov.b64 {%r1, %r0}, %rd1;", 5),
    ("mov.u32 %r1, 0x1fff5; cvt.u16.u32 %rs1, %r1; cvt.u32.u16 %r0, %rs1;", 0xFFF5),
    ("mov.u16 %rs1, 0xfff5; cvt.s32.s16 %r0, %rs1;", -11 & M),
    ("mov.u16 %rs1, 0x1f5; cvt.s32.s8 %r0, %rs1;", -11 & M),
    ("cvt.s64.s32 %rd9, -3;", -3 & (M << 32 | M)),
    (f"add.rn.f32 %f1, {f32(0.1)}, {f32(0.2)}; mov.b32 %r0, %f1;", bits(0.30000001192092896)),
    (f"div.rn.f32 %f1, {f32(1.0)}, {f32(3.0)}; mov.b32 %r0, %f1;", bits(0.3333333432674408)),
    (f"cvt.rn.bf16x2.f32 %r0, {f32(2.0)}, {f32(1.00390625)};", 0x40003F80),
]


@pytest.mark.parametrize(("code", "expected"), RESULTS, ids=[code.partition(";")[0] for code, _ in RESULTS])
def test_values(code: str, expected: int) -> None:
    store = "st.global.u64 [%rd0], %rd9;" if "%rd9" in code else "cvt.u64.u32 %rd8, %r0; st.global.u64 [%rd0], %rd8;"
    found = words(1)
    run(entry(f"ld.param.u64 %rd0, [main_0];\n{code}\n{store}", parameters=1), found)
    assert found[0] == expected


@pytest.mark.parametrize(
    ("mode", "b", "c", "source", "inside"),
    [
        ("idx", 5, 31, lambda lane: 5, lambda lane: True),
        ("idx", 1, 28 << 8 | 31, lambda lane: lane & 28 | 1, lambda lane: True),
        ("up", 2, 0, lambda lane: lane - 2 if lane >= 2 else lane, lambda lane: lane >= 2),
        ("down", 3, 31, lambda lane: lane + 3 if lane < 29 else lane, lambda lane: lane < 29),
        ("bfly", 16, 31, lambda lane: lane ^ 16, lambda lane: True),
    ],
)
def test_shuffles(mode: str, b: int, c: int, source: object, inside: object) -> None:
    found = words(32)
    body = f"""
    ld.param.u64 %rd0, [main_0];
    mov.u32 %r1, %tid.x;
    mul.lo.s32 %r2, %r1, 10;
    shfl.sync.{mode}.b32 %r3|%p1, %r2, {b}, {c}, -1;
    selp.u32 %r4, 1000, 0, %p1;
    add.s32 %r5, %r3, %r4;
    cvt.u64.u32 %rd2, %r5;
    mul.wide.u32 %rd3, %r1, 8;
    add.s64 %rd4, %rd0, %rd3;
    st.global.u64 [%rd4], %rd2;
    """
    run(entry(body, parameters=1), found)
    expected = [10 * source(lane) + 1000 * inside(lane) for lane in range(32)]  # type: ignore[operator]
    assert [*found] == expected


def test_votes() -> None:
    found = words(3)
    body = """
    ld.param.u64 %rd0, [main_0];
    mov.u32 %r1, %tid.x;
    and.b32 %r2, %r1, 1;
    setp.eq.s32 %p1, %r2, 1;
    vote.sync.ballot.b32 %r3, %p1, -1;
    vote.sync.any.pred %p2, %p1, -1;
    vote.sync.all.pred %p3, %p1, -1;
    setp.ne.s32 %p4, %r1, 0;
    @%p4 bra $L_end;
    cvt.u64.u32 %rd1, %r3;
    st.global.u64 [%rd0], %rd1;
    selp.b64 %rd2, 1, 0, %p2;
    st.global.u64 [%rd0+8], %rd2;
    selp.b64 %rd3, 1, 0, %p3;
    st.global.u64 [%rd0+16], %rd3;
$L_end:
    """
    run(entry(body, parameters=1), found)
    assert [*found] == [0xAAAAAAAA, 1, 0]


def test_calls_and_windows_of_memory() -> None:
    """A function gets the address of its caller's local memory, and that of a variable."""
    before = """
.global .align 8 .u64 $counted = 40;
.func (.param .b64 result) count(.param .b64 count_0, .param .b32 count_1)
{
    .reg .b64 %rd<5>;
    .reg .b32 %r<3>;
    ld.param.u64 %rd1, [count_0];
    ld.param.u32 %r1, [count_1];
    ld.u64 %rd2, [%rd1];
    cvt.u64.u32 %rd3, %r1;
    add.s64 %rd4, %rd2, %rd3;
    st.u64 [%rd1], %rd4;
    st.param.b64 [result+0], %rd2;
    ret;
}
"""
    body = """
    .local .align 8 .b8 __depot[16];
    .shared .align 8 .b8 place[8];
    ld.param.u64 %rd0, [main_0];
    mov.u64 %rd1, __depot;
    cvta.local.u64 %rd2, %rd1;
    st.local.u64 [%rd1+8], 7;
    add.s64 %rd3, %rd2, 8;
    {
    .param .b64 param0;
    st.param.b64 [param0+0], %rd3;
    .param .b32 param1;
    st.param.b32 [param1+0], 5;
    .param .b64 retval0;
    call.uni (retval0), count, (param0, param1);
    ld.param.b64 %rd4, [retval0+0];
    }
    ld.local.u64 %rd5, [%rd1+8];
    mov.u64 %rd6, $counted;
    ld.u64 %rd7, [%rd6];
    st.global.u64 [%rd0], %rd4;
    st.global.v2.u64 [%rd0+16], {%rd5, %rd7};
    cvta.param.u64 %rd8, main_0;
    ld.u64 %rd9, [%rd8];
    sub.s64 %rd10, %rd9, %rd0;
    st.global.u64 [%rd0+8], %rd10;
    """
    memory = words(4)
    run(entry(body, before, parameters=1), memory)
    assert [*memory] == [7, 0, 12, 40]
