"""Runs over the stand-in for the driver: prints what each call asks of the GPU's streams, on one rank."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

import pretend_gpu
from cases import BY_NAME
from deep_ep_py import Buffer
from deep_ep_py.device.cuda import CudaDevice
from deep_ep_py.testing import run_ranks
from harness import Trial
from low_latency import Work
from low_latency import combine as low_latency_combine
from low_latency import dispatch as low_latency_dispatch
from low_latency import make_buffer as make_low_latency
from low_latency_gpu import BY_NAME as LOW_LATENCY

NAMES = {"launch": "launches", "cuEventRecord": "records", "cuStreamWaitEvent": "waits"}
by_torch: Counter[str] = Counter()


class Stream:
    """A stream of torch."""

    def __init__(self, handle: int, device: Any = None) -> None:
        del device
        self.cuda_stream, self.stream_id = handle, 0

    def wait_event(self, event: Any) -> None:
        by_torch["waits"] += 1

    def wait_stream(self, other: Any) -> None:
        by_torch.update(("records", "waits"))


class Event:
    """An event of torch."""

    def record(self, stream: Any) -> None:
        by_torch["records"] += 1


class Streams(pretend_gpu.PretendGpu):
    """A GPU whose stand-in orders nothing: the streams are CudaDevice's."""

    launch_on_callers_stream = CudaDevice.launch_on_callers_stream
    order_after_caller = CudaDevice.order_after_caller
    order_caller_after = CudaDevice.order_caller_after


@cache
def callers() -> Stream:
    """Return the caller's stream; from then on the process uses CUDA."""
    torch.cuda.is_initialized = lambda: True  # type: ignore[assignment]
    return Stream(pretend_gpu.make_stream())


def counted(call: Callable[..., Any], buffer: Buffer, *arguments: Any, **options: Any) -> tuple[Any, dict[str, int]]:
    """Return the result of a call of the Buffer, and the operations of streams that it took."""
    log = Path(os.environ["DOUBLE_LOG"])
    before = len(log.read_text())
    by_torch.clear()
    result = call(buffer, *arguments, **options)
    lines = log.read_text()[before:].splitlines()
    seen = by_torch + Counter(NAMES[line.split()[0]] for line in lines if line.split()[0] in NAMES)
    assert buffer.runtime.settle(20.0)
    return result, {name: seen[name] for name in NAMES.values()}


def low_latency(group: Any, async_finish: bool) -> dict[str, Any]:
    sizes = LOW_LATENCY["low_latency_one_rank"]
    work = Work.of(sizes)
    buffer = make_low_latency(group, sizes, "peer", device="cuda")
    found = {}
    for _ in range(2):  # the first call makes the kernels
        results, found["dispatch"] = counted(low_latency_dispatch, buffer, work, async_finish=async_finish)
        _, found["combine"] = counted(low_latency_combine, buffer, work, results[2], async_finish=async_finish)
        if not async_finish:
            results, found["send"] = counted(low_latency_dispatch, buffer, work, return_recv_hook=True)
            _, found["receive"] = counted(lambda buffer, hook: hook(), buffer, results[4])
    return found


def normal(group: Any) -> dict[str, Any]:
    trial = Trial.of(BY_NAME["one_rank_alone"])
    work, case = trial.work, trial.case
    buffer = Buffer(group, 1 << 20, fabric="peer", device="cuda", arena_bytes=1 << 24)
    found = {}
    for _ in range(2):
        layout, found["layout"] = counted(Buffer.get_dispatch_layout, buffer, work.topk_idx[0], case.experts)
        per_rank, _, per_expert, in_rank, _ = layout
        given = {"num_tokens_per_rank": per_rank, "is_token_in_rank": in_rank, "num_tokens_per_expert": per_expert}
        ids = {"topk_idx": work.topk_idx[0], "topk_weights": work.topk_weights[0]}
        results, found["dispatch"] = counted(Buffer.dispatch, buffer, work.x[0], **given, **ids)
        _, found["cached dispatch"] = counted(Buffer.dispatch, buffer, work.x[0], handle=results[4])
        _, found["combine"] = counted(Buffer.combine, buffer, results[0].to(torch.bfloat16), results[4])
    return found


if __name__ == "__main__":
    pretend_gpu.install(compile_kernels=False)
    pretend_gpu.PretendGpu = Streams  # type: ignore[misc]
    torch.cuda.current_stream = lambda device=None: callers()  # type: ignore[assignment]
    torch.cuda.ExternalStream, torch.cuda.Event = Stream, Event  # type: ignore[misc, assignment]
    torch.Tensor.record_stream = lambda tensor, stream: None  # type: ignore[method-assign]
    found = {
        "low latency": run_ranks(1, low_latency, False, device="cuda")[0],
        "low latency, async_finish": run_ranks(1, low_latency, True, device="cuda")[0],
        "normal": run_ranks(1, normal, device="cuda")[0],
    }
    print(json.dumps(found))
