"""Runs under torchrun, over the stand-in for the driver: a benchmark's command line, on ranks with one GPU each.

    gpu_per_rank.py bench|rates all|own|shared OPTIONS

All ranks see as many GPUs as there are ranks, or each sees one of its own, or all see the same one. With MACHINES=2 in
the environment they appear to be on that many machines; with PROBE_CUBIN there is NVSHMEM, and ConnectX NICs in the
folder NICS.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rates_on_threads import times

import pretend_gpu
import pretend_torch_cuda
from deep_ep_py.tools.bench import cli, gpu_low_latency, gpu_normal, gpu_timing, rates
from deep_ep_py.transport.bootstrap import start
from deep_ep_py.transport.nvshmem import choice


def measure_copy() -> float:
    """Return a different figure on each rank."""
    return 100.0 + int(os.environ["RANK"])


class ScriptedTimer:
    """A replacement for EventTimer with fabricated times: rank 0's are half of the slowest rank's."""

    script = times()

    def time(self, launch: Callable[[], Any], stream: Any, align: Callable[[], Any] | None) -> tuple[Any, float]:
        del stream
        assert align is not None, "several ranks do not begin together"
        align()
        return launch(), next(self.script) / (2 - int(os.environ["RANK"]))


def be_on_machines(count: int) -> int:
    """Make this machine appear as one of several, to torchrun's variables and to Buffers. Returns its index."""
    rank, near = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]) // count
    os.environ.update(LOCAL_RANK=str(rank % near), LOCAL_WORLD_SIZE=str(near))
    start.machine_name = lambda: f"machine {rank // near}"  # type: ignore[assignment]
    return rank // near


def have_nvshmem() -> None:
    """Use the probe that NVRTC has compiled; the stand-in's heaps are small."""
    pretend_gpu.take_compiled_probe()
    choice._NICS = Path(os.environ.get("NICS", "/nowhere"))
    gpu_normal._ARENA_SLACK = gpu_low_latency._ARENA_SLACK = 4 << 20


def main() -> None:
    command, sees, options = sys.argv[1], sys.argv[2], sys.argv[3:]
    machine = be_on_machines(int(os.environ.get("MACHINES", "1")))
    if "PROBE_CUBIN" in os.environ:
        have_nvshmem()
    rank, ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    uuids = {
        "all": [f"GPU-{machine}.{i}" for i in range(ranks)],
        "own": [f"GPU-{machine}.{rank}"],
        "shared": ["GPU-0"],
    }[sees]
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
