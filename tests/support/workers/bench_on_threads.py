"""Runs over the stand-in for the driver: the GPU's benchmark, on ranks that are threads, with the CPU's clock."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pretend_gpu
from deep_ep_py.tools.bench import BenchConfig, gpu, gpu_timing
from deep_ep_py.tools.bench.results import report


class CpuTimer:
    """A replacement for GpuTimer where calls have ended when they return."""

    def __init__(self, ranks: Any) -> None:
        self._ranks = ranks
        self._samples: dict[str, list[float]] = defaultdict(list)
        self.recording = False

    def time(self, name: str, call: Callable[[], Any], stream: Any = None) -> Any:
        del stream
        self._ranks.all_gather(None)
        begin = time.perf_counter()
        result = call()
        if self.recording:
            self._samples[name].append(1e3 * (time.perf_counter() - begin))
        return result

    def series(self) -> dict[str, list[float]]:
        everyones = self._ranks.all_gather(dict(self._samples))
        return {name: [max(times) for times in zip(*(one[name] for one in everyones))] for name in self._samples}

    def late_starts(self) -> int:
        return 0


def measure_copy() -> float:
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "32", "set before the process first uses CUDA: here"
    return 100.0


def main() -> None:
    pretend_gpu.install(compile_kernels=False)
    pretend_gpu.PretendGpu.comm_stream = None
    gpu_timing.GpuTimer, gpu_timing.measure_copy = CpuTimer, measure_copy
    mode, dtype, corrupt = sys.argv[1], sys.argv[2], sys.argv[3] if len(sys.argv) > 3 else None
    config = BenchConfig(
        mode,
        "cuda",
        4,
        tokens=(16, 40),
        hidden=128,
        topk=4,
        experts=16,
        dtype=dtype,
        iterations=5,
        warmup=1,
        corrupt=corrupt,
    )
    config.validate()
    print(json.dumps(report(config, gpu.run_bench_on_gpu(config, lambda event: None))))


if __name__ == "__main__":
    main()
