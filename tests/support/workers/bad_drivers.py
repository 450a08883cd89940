"""Runs over the stand-in for the driver at its worst permitted behavior: Buffers continue, or report the problem."""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Any

import pytest

import pretend_gpu
from cases import BY_NAME
from deep_ep_py.errors import CudaError, DeepEPTimeout
from deep_ep_py.testing import run_ranks
from harness import Trial, dispatch_arguments, make_buffer, round_trip

TRIAL = Trial.of(BY_NAME["two_ranks"])


def warm_round_trip(group: Any, timeout: float = 20.0) -> None:
    buffer = make_buffer(group, TRIAL.case, "peer", device="cuda", timeout=timeout)
    buffer.warmup(TRIAL.case.hidden, TRIAL.case.topk)
    round_trip(buffer, buffer.rank, TRIAL, blocks=2)
    buffer.destroy()


def note_of_the_timeout() -> str:
    with pytest.raises(DeepEPTimeout) as info:
        run_ranks(2, warm_round_trip, timeout=1.0, device="cuda")
    return next(note for note in info.value.__notes__ if "share this GPU" in note)


def serial_cooperative_launches() -> None:
    """Ranks wait for each other until the timeout, which suggests launches of the other kind."""
    os.environ["DOUBLE_COOPERATIVE_SERIAL"] = "1"
    note = note_of_the_timeout()
    assert note.startswith("2 ranks share this GPU: kernels that it does not run side by side wait for each other"), (
        note
    )
    assert "with cooperative launches (DEEP_EP_LAUNCH)" in note, note
    os.environ["DEEP_EP_LAUNCH"] = "plain"
    run_ranks(2, warm_round_trip, device="cuda")
    del os.environ["DOUBLE_COOPERATIVE_SERIAL"], os.environ["DEEP_EP_LAUNCH"]


def a_driver_that_is_shut_down() -> None:
    """Calls made after that report it; objects released after that do so silently, and so does the process."""

    def on_each_rank(group: Any) -> Any:
        buffer = make_buffer(group, TRIAL.case, "peer", device="cuda")
        round_trip(buffer, buffer.rank, TRIAL, blocks=2)
        kept = buffer.dispatch(**dispatch_arguments(TRIAL.work, buffer.rank))
        group.barrier()
        ctypes.CDLL("libcuda.so.1").double_shut_down()
        with pytest.raises(CudaError, match="the CUDA driver has been shut down, as it is when a process ends"):
            buffer.dispatch(**dispatch_arguments(TRIAL.work, buffer.rank))
        return kept, buffer

    del run_ranks(2, on_each_rank, device="cuda")[0]


def too_few_queues() -> None:
    """Ranks share one queue: they wait for each other until the timeout, which names the variable."""
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    ctypes.CDLL("libcuda.so.1").cuInit(0)
    note = note_of_the_timeout()
    assert "CUDA_DEVICE_MAX_CONNECTIONS=32, which works only if set before CUDA starts" in note, note


def a_driver_for_cuda_12() -> None:
    """It would refuse each kernel with an error that does not say why."""
    os.environ["DOUBLE_DRIVER_VERSION"] = "12080"
    with pytest.raises(
        CudaError, match="the driver supports CUDA 12.8, and loads no kernels of NVRTC 1[3-9].*gpu-cu12"
    ):
        run_ranks(2, warm_round_trip, device="cuda")
    del os.environ["DOUBLE_DRIVER_VERSION"]


def little_shared_memory() -> None:
    """A block keeps data for every rank in shared memory: the maximum number of ranks is computed, and reported."""
    os.environ["DOUBLE_SHARED_BYTES"] = "2048"

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, TRIAL.case, "peer", device="cuda")
        with pytest.raises(ValueError, match=r"group.size\(\)=2: expected at most [01] ranks, .* shared memory"):
            buffer.dispatch(**dispatch_arguments(TRIAL.work, buffer.rank))
        buffer.destroy()

    run_ranks(2, on_each_rank, device="cuda")
    del os.environ["DOUBLE_SHARED_BYTES"]


SCENARIOS = (
    a_driver_for_cuda_12,
    little_shared_memory,
    serial_cooperative_launches,
    a_driver_that_is_shut_down,
    too_few_queues,
)


def main() -> None:
    pretend_gpu.install(compile_kernels=False)
    for scenario in SCENARIOS:
        if scenario.__name__ in sys.argv[1:]:
            scenario()
            print(scenario.__name__, flush=True)


if __name__ == "__main__":
    main()
