"""The predicted time of small programs whose longest path is known."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import pytest

from deep_ep_py.base.native import C
from ptx_programs import entry, run, words

pytestmark = pytest.mark.skipif(C.WARP_SIZE != 32, reason="warps have 32 threads in PTX")

HBM, L2, L1, DEVICE_FENCE, SYSTEM_FENCE, DIVISION = 850, 273, 38, 500, 900, 222
SLACK = 60  # cycles of the instructions around what a test is about


@pytest.fixture(autouse=True)
def counted() -> Iterator[None]:
    C.ptx.time(one_gpu=False, counts=False)
    yield
    C.ptx.count(False)


def time() -> Any:
    """Return the time of the launch that has run."""
    ((kernel, _),) = C.ptx.counted().values()
    (launch,) = kernel.times
    assert launch.end - launch.begin == pytest.approx(sum(launch.cycles_by_place.values()), abs=L2)
    return launch


def cycles() -> float:
    launch = time()
    return launch.end - launch.begin


FIRST = "ld.param.u64 %rd0, [main_0];\n"


def test_loads_that_depend_on_each_other() -> None:
    """A list of pointers: each load waits for the one before it."""
    memory = words(160)
    base = ctypes.addressof(memory)
    for i in range(3):
        memory[40 * i] = base + 320 * (i + 1)
    body = FIRST + "ld.global.u64 %rd0, [%rd0];\n" * 3 + "add.s64 %rd1, %rd0, 1;"
    run(entry(body, parameters=1), memory, threads=1)
    assert cycles() == pytest.approx(3 * HBM, abs=SLACK)
    assert time().waits == 3


def test_loads_in_flight_together() -> None:
    body = FIRST + "".join(f"ld.global.u64 %rd{i + 1}, [%rd0+{256 * i}];\n" for i in range(3))
    body += "add.s64 %rd4, %rd1, %rd2;\nadd.s64 %rd4, %rd4, %rd3;"
    run(entry(body, parameters=1), words(160), threads=1)
    assert cycles() == pytest.approx(HBM, abs=SLACK)
    assert time().waits == 1


def test_what_is_in_a_cache() -> None:
    again = "ld.global.u64 %rd1, [%rd0];\nadd.s64 %rd2, %rd1, 1;\nadd.s64 %rd0, %rd0, %rd1;\n"
    run(entry(FIRST + 3 * again, parameters=1), words(2), threads=1)
    assert cycles() == pytest.approx(HBM + 2 * L1, abs=SLACK)


def test_an_acquire_drops_the_first_cache() -> None:
    load = "ld.global.u64 %rd1, [%rd0];\nadd.s64 %rd0, %rd0, %rd1;\n"
    body = FIRST + load + "ld.acquire.gpu.global.u64 %rd2, [%rd0];\n" + load
    run(entry(body, parameters=1), words(2), threads=1)
    assert cycles() == pytest.approx(HBM + 2 * L2, abs=SLACK)


@pytest.mark.parametrize(
    ("instruction", "least"),
    [
        ("st.release.gpu.global.u64 [%rd0], 1;", DEVICE_FENCE),
        ("fence.proxy.async;", DEVICE_FENCE),
        ("st.release.sys.global.u64 [%rd0], 1;", SYSTEM_FENCE),
        ("st.relaxed.sys.global.u64 [%rd0], 1;", 0),
        ("div.u64 %rd1, %rd0, 7;\nadd.s64 %rd1, %rd1, 1;", DIVISION),
    ],
)
def test_what_an_instruction_costs(instruction: str, least: int) -> None:
    run(entry(FIRST + instruction, parameters=1), words(2), threads=1)
    assert cycles() == pytest.approx(least, abs=SLACK)
    assert time().fences == int(least >= DEVICE_FENCE)


SLOW_WARP = """
    mov.u32 %r1, %tid.x;
    setp.lt.u32 %p1, %r1, 32;
    @%p1 fence.proxy.async;
    bar.sync 0;
    @!%p1 fence.proxy.async;
"""


def test_a_barrier_waits_for_the_slowest_warp() -> None:
    """The path goes through one warp before the barrier, and through another one after it."""
    run(entry(SLOW_WARP, parameters=0), threads=64)
    assert cycles() == pytest.approx(2 * DEVICE_FENCE, abs=2 * SLACK)
    launch = time()
    assert (launch.fences, launch.barriers) == (2, 1)


FLAG = """
    ld.param.u64 %rd0, [main_0];
    mov.u32 %r1, %ctaid.x;
    setp.eq.u32 %p1, %r1, 0;
    @%p1 bra $L_first;
$L_wait:
    ld.acquire.sys.global.u64 %rd1, [%rd0];
    setp.eq.u64 %p2, %rd1, 0;
    @%p2 bra $L_wait;
    bra $L_end;
$L_first:
    ld.global.u64 %rd2, [%rd0+512];
    add.s64 %rd3, %rd2, 1;
    st.release.sys.global.u64 [%rd0], %rd3;
$L_end:
"""


def test_a_thread_that_waits_for_another_block() -> None:
    """The path is that of the block which stores the flag; how often the other one looks is no part of it."""
    run(entry(FLAG, parameters=1), words(130), blocks=2, threads=1)
    assert cycles() == pytest.approx(HBM + SYSTEM_FENCE + L2, abs=2 * SLACK + L2)
    launch = time()
    assert launch.fences == 1 and launch.instructions < 20
