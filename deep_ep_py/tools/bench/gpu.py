"""The benchmark on GPUs. Ranks are threads of this process that share one GPU, each with a stream and its share of the
GPU, or, if torchrun has started them, processes with a GPU each.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from deep_ep_py.base.environment import PROVIDER
from deep_ep_py.tools.bench import gpu_timing
from deep_ep_py.tools.bench.config import BenchConfig
from deep_ep_py.tools.bench.gpu_low_latency import GpuLowLatencyRun
from deep_ep_py.tools.bench.gpu_normal import GpuNormalRun
from deep_ep_py.tools.bench.gpu_ranks import gpu_per_rank
from deep_ep_py.tools.bench.gpu_size_run import Event, GpuSizeRun
from deep_ep_py.tools.bench.launch import require_torchrun_ranks, under_torchrun
from deep_ep_py.transport.bootstrap.groups import make_bootstrap


def run_bench_on_gpu(config: BenchConfig, on_event: Callable[[Event], None]) -> list[dict[str, Any]]:
    """Measure all sizes, on one GPU that the ranks share, or on torchrun's ranks.

    Parameters
    ----------
    config
        The run.
    on_event
        Receives rank 0's progress.

    Returns
    -------
    list of dict
        For each size, the input of `results.report`; the same on every rank.

    Raises
    ------
    ValueError
        Torchrun has started a different number of ranks, there are too few GPUs, or nothing joins the nodes.
    """
    if config.provider:
        os.environ[PROVIDER] = config.provider
    if under_torchrun():
        require_torchrun_ranks(config.ranks)
        with gpu_per_rank() as group:
            copy_gb_per_s = min(make_bootstrap(group).all_gather(gpu_timing.measure_copy()))
            sizes = _on_each_rank(group, config, on_event)
        gpus = config.ranks
    else:
        from deep_ep_py.device.hardware_queues import provide_hardware_queues
        from deep_ep_py.testing import run_ranks

        provide_hardware_queues()
        copy_gb_per_s = gpu_timing.measure_copy()
        sizes = run_ranks(config.ranks, _on_each_rank, config, on_event, device="cuda")[0]
        gpus = 1
    return [{**size, "copy_gb_per_s": copy_gb_per_s, "gpus": gpus} for size in sizes]


def _on_each_rank(group: Any, config: BenchConfig, on_event: Callable[[Event], None]) -> list[dict[str, Any]]:
    emit = on_event if group.rank() == 0 else _discard
    run: type[GpuSizeRun] = GpuLowLatencyRun if config.mode == "low-latency" else GpuNormalRun
    return [run(group, config, tokens, emit).run() for tokens in config.tokens]


def _discard(event: Event) -> None:
    del event
