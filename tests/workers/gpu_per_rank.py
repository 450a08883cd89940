"""Runs under torchrun, over the stand-in for the driver: a benchmark's command line, on ranks with a GPU each.

    gpu_per_rank.py bench|rates all|own|shared OPTIONS

All ranks see as many GPUs as there are ranks, or each sees one that is its own, or each the same one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from rates_on_threads import times

import pretend_gpu
import pretend_torch_cuda
from deep_ep_py.bench import cli, gpu_timing, rates


def measure_copy() -> float:
    """Another figure on each rank."""
    return 100.0 + int(os.environ["RANK"])


class ScriptedTimer:
    """What EventTimer does, with times made up: rank 0's are half of the slowest rank's."""

    script = times()

    def time(self, launch: Callable[[], Any], stream: Any, align: Callable[[], Any] | None) -> tuple[Any, float]:
        del stream
        assert align is not None, "several ranks do not begin together"
        align()
        return launch(), next(self.script) / (2 - int(os.environ["RANK"]))


def main() -> None:
    command, sees, options = sys.argv[1], sys.argv[2], sys.argv[3:]
    rank, ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    uuids = {"all": [f"GPU-{i}" for i in range(ranks)], "own": [f"GPU-{rank}"], "shared": ["GPU-0"]}[sees]
    torch.set_num_threads(1)
    current = pretend_torch_cuda.install(uuids)
    pretend_gpu.install(compile_kernels=False)
    pretend_gpu.PretendGpu.comm_stream = None
    gpu_timing.measure_copy = measure_copy
    rates.EventTimer = ScriptedTimer  # type: ignore[assignment, misc]
    try:
        {"bench": cli.command, "rates": rates.command}[command].main(options)
    finally:
        assert current == [rank if sees == "all" else 0]


if __name__ == "__main__":
    main()
