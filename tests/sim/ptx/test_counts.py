"""The counts of small programs with known counts."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import pytest

from deep_ep_py.base.native import C
from ptx_programs import entry, run, words

pytestmark = pytest.mark.skipif(C.WARP_SIZE != 32, reason="warps have 32 threads in PTX")

SHARED = ".extern .shared .align 128 .b8 dynamic[];\n"


@pytest.fixture(autouse=True)
def counted() -> Iterator[None]:
    C.ptx.count(True)
    yield
    C.ptx.count(False)


def counts() -> tuple[Any, dict[str, Any]]:
    """Return the counts of the kernel that has run, in total and by opcode."""
    (found,) = C.ptx.counted().values()
    kernel, reports = found
    return kernel, {one.opcode: one for one in reports}


STRIDED = """
    ld.param.u64 %rd0, [main_0];
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %rd1, %r1, STRIDE;
    add.s64 %rd2, %rd0, %rd1;
    ld.global.u64 %rd3, [%rd2];
"""


@pytest.mark.parametrize(("stride", "sectors"), [(8, 8), (16, 16), (32, 32), (64, 32), (0, 1)])
def test_sectors(stride: int, sectors: int) -> None:
    """32 loads of 8 bytes each."""
    memory = words(260)
    run(entry(STRIDED.replace("STRIDE", str(stride)), parameters=1), align(memory))
    _, of = counts()
    load = of["ld.global.u64"]
    assert (load.threads, load.warps, load.bytes, load.sectors) == (32, 1, 256, sectors)
    assert load.peer_sectors == 0


def align(memory: Any) -> int:
    """Return an address in `memory` that is a multiple of 32."""
    return -(-ctypes.addressof(memory) // 32) * 32


def test_peers_memory() -> None:
    memory = words(40)
    base = align(memory)
    C.ptx.add_heap(base, 256, 1)
    run(entry(STRIDED.replace("STRIDE", "8"), parameters=1), base)
    load = counts()[1]["ld.global.u64"]
    assert (load.peer_bytes, load.peer_sectors, load.sectors) == (256, 8, 8)


BANKS = """
    mov.u32 %r1, %tid.x;
    mul.lo.s32 %r2, %r1, STRIDE;
    mov.u32 %r3, dynamic;
    add.s32 %r4, %r3, %r2;
    st.shared.u32 [%r4], %r1;
"""


@pytest.mark.parametrize(
    ("stride", "wavefronts", "least"), [(4, 1, 1), (8, 2, 1), (128, 32, 1), (132, 1, 1), (0, 1, 1)]
)
def test_bank_conflicts(stride: int, wavefronts: int, least: int) -> None:
    run(entry(BANKS.replace("STRIDE", str(stride)), SHARED, parameters=0), shared_bytes=4224)
    store = counts()[1]["st.shared.u32"]
    assert (store.wavefronts, store.min_wavefronts) == (wavefronts, least)


WIDE = """
    mov.u32 %r1, %tid.x;
    mul.lo.s32 %r2, %r1, 16;
    mov.u32 %r3, dynamic;
    add.s32 %r4, %r3, %r2;
    st.shared.v4.b32 [%r4], {%r1, %r1, %r1, %r1};
"""


def test_wide_accesses_of_shared_memory() -> None:
    """Eight adjacent threads at a time, whichever arrived first."""
    run(entry(WIDE, SHARED, parameters=0), threads=256, shared_bytes=4096)
    store = counts()[1]["st.shared.v4.b32"]
    assert (store.warps, store.wavefronts, store.min_wavefronts) == (8, 32, 32)


LOOP = """
    mov.u32 %r1, %tid.x;
    and.b32 %r2, %r1, 7;
$L_loop:
    sub.s32 %r2, %r2, 1;
    setp.ge.s32 %p1, %r2, 0;
    @%p1 bra $L_loop;
    bar.warp.sync -1;
    setp.eq.s32 %p2, %r1, 3;
    @%p2 xor.b32 %r3, %r1, 1;
    @!%p2 or.b32 %r3, %r1, 1;
"""


def test_instructions_of_a_warp() -> None:
    """As many as the thread that executes the most; both sides of a branch count."""
    run(entry(LOOP, parameters=0), blocks=2, threads=64)
    kernel, of = counts()
    assert (kernel.launches, kernel.blocks, kernel.warps) == (1, 2, 4)
    assert (of["sub.s32"].warps, of["sub.s32"].threads) == (4 * 8, 16 * sum(range(1, 9)))
    assert (of["xor.b32"].warps, of["xor.b32"].threads) == (2, 2)
    assert (of["or.b32"].warps, of["or.b32"].threads) == (4, 126)


LOADS = """
    ld.param.u64 %rd0, [main_0];
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %rd1, %r1, 32;
    add.s64 %rd2, %rd0, %rd1;
    ld.global.v2.u64 {%rd3, %rd4}, [%rd2];
    BETWEEN
    ld.global.v2.u64 {%rd5, %rd6}, [%rd2+16];
    add.s64 %rd7, %rd3, %rd5;
    add.s64 %rd8, %rd4, %rd6;
"""


@pytest.mark.parametrize(("between", "trips"), [("", 1), ("add.s64 %rd9, %rd4, 1;", 2), ("add.s64 %rd9, %rd2, 1;", 1)])
def test_bytes_in_flight(between: str, trips: int) -> None:
    """A thread waits where it first uses a loaded value, for all loads in flight."""
    run(entry(LOADS.replace("BETWEEN", between), parameters=1), words(130))
    kernel, _ = counts()
    assert (kernel.row_bytes, kernel.row_trips) == (1024, trips)


def test_barriers_of_a_block() -> None:
    run(entry("bar.sync 0;\nbar.sync 0;", parameters=0), threads=64)
    assert counts()[0].max_block_barriers == 2


def test_nothing_is_counted_unless_it_is_asked_for() -> None:
    C.ptx.count(False)
    run(entry("bar.sync 0;", parameters=0))
    assert C.ptx.counted() == {}
