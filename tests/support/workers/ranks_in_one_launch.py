"""Runs over the stand-in for the driver, which lets no two kernels run side by side: ranks that launch together.

Arguments select cases, or the failures.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

import pytest

import pretend_gpu
from cases import BY_NAME
from deep_ep_py.errors import DeepEPError, DeepEPTimeout
from deep_ep_py.testing import run_ranks
from gpu_ranks import on_each_rank, run_named_cases
from harness import Trial, dispatch_arguments, make_buffer

MAX_RANKS = 8
TRIAL = Trial.of(BY_NAME["three_ranks"])
TOGETHER: dict[str, Any] = {"device": "cuda", "one_launch": True}


def errors_of(fn: Any, timeout: float) -> list[BaseException | None]:
    """Return what each rank raises where the Buffer has this timeout."""
    made = threading.Barrier(3)  # the group's could fail a rank that has been released but has not yet woken up

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, TRIAL.case, "peer", device="cuda", timeout=timeout)
        made.wait()
        fn(buffer, dispatch_arguments(TRIAL.work, buffer.rank))

    with pytest.raises(BaseException) as info:  # noqa: B017 - whatever it is
        run_ranks(3, on_each_rank, **TOGETHER)
    return [info.value.rank_exceptions.get(rank) for rank in range(3)]


def another_kernel(buffer: Any, arguments: dict[str, Any]) -> None:
    if buffer.rank == 1:
        buffer.get_dispatch_layout(arguments["topk_idx"], TRIAL.case.experts)
    else:
        buffer.dispatch(**arguments)


def comes_too_late(buffer: Any, arguments: dict[str, Any]) -> None:
    if buffer.rank == 1:
        time.sleep(3)
    buffer.dispatch(**arguments)


def raises_before(buffer: Any, arguments: dict[str, Any]) -> None:
    if buffer.rank == 1:
        time.sleep(0.5)  # the others wait in their launch
        raise ZeroDivisionError("the cause")
    buffer.dispatch(**arguments)


def returns_before(buffer: Any, arguments: dict[str, Any]) -> None:
    if buffer.rank != 1:
        buffer.dispatch(**arguments)


def captures(buffer: Any, arguments: dict[str, Any]) -> None:
    with pretend_gpu.Graph().capture():
        buffer.dispatch(**arguments, num_worst_tokens=TRIAL.max_rows)


def check_failures() -> None:
    """Every rank names the one that did not arrive, or its mismatch; promptly, unless it could still have arrived."""
    for error in errors_of(another_kernel, timeout=60.0):
        assert isinstance(error, DeepEPError), error
        assert "rank 1 came with layout for 3 ranks, rows of 0 bytes and top-3, 2 blocks" in str(error), error
        assert "came with notify for 3 ranks, rows of 128 bytes and top-3, 2 blocks of 4 warps" in str(error), error
    for error in errors_of(comes_too_late, timeout=1.0):
        assert isinstance(error, DeepEPError), error
        assert "ranks 0, 2 came with notify" in str(error) and "rank 1 did not come within 1 s" in str(error), error
    began = time.monotonic()
    first, cause, last = errors_of(raises_before, timeout=60.0)
    assert isinstance(cause, ZeroDivisionError)
    for error in (first, last):
        assert isinstance(error, DeepEPError) and "rank 1 will not come again" in str(error), error
    first, none, last = errors_of(returns_before, timeout=60.0)
    assert none is None
    for error in (first, last):
        assert isinstance(error, DeepEPError) and "rank 1 will not come again" in str(error), error
    assert time.monotonic() - began < 30, "no rank waits for one that has ended"
    error = errors_of(captures, timeout=60.0)[0]
    assert isinstance(error, DeepEPError) and "rank 0 came with notify in a capture" in str(error), error


def check_that_kernels_take_turns() -> None:
    """The reason for a common launch: ranks that launch separately would wait for each other forever."""
    with pytest.raises(DeepEPTimeout, match="waited for counts"):
        run_ranks(3, on_each_rank, TRIAL, device="cuda", timeout=1.0)


def main() -> None:
    pretend_gpu.install(compile_kernels=False)
    if "failures" in sys.argv:
        check_that_kernels_take_turns()
        check_failures()
        return
    run_named_cases(MAX_RANKS, sys.argv[1:], **TOGETHER)


if __name__ == "__main__":
    main()
