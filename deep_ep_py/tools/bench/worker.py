"""One rank's part of the benchmark."""

from __future__ import annotations

import os
from typing import Any

from deep_ep_py.base.environment import PROVIDER
from deep_ep_py.tools.bench.config import BenchConfig
from deep_ep_py.tools.bench.elastic import ElasticRun
from deep_ep_py.tools.bench.low_latency import LowLatencyRun
from deep_ep_py.tools.bench.normal import NormalRun
from deep_ep_py.tools.bench.rank_job import RankContext


def run_bench(context: RankContext, config: BenchConfig) -> list[dict[str, Any]]:
    """Measure all sizes.

    Parameters
    ----------
    context
        This rank.
    config
        The run.

    Returns
    -------
    list of dict
        For each size, the input of `results.report`; the same on every rank.
    """
    if config.provider:
        os.environ[PROVIDER] = config.provider
    runs: dict[str, Any] = {"normal": NormalRun, "low-latency": LowLatencyRun, "elastic": ElasticRun}
    return [runs[config.mode](context, config, tokens).run() for tokens in config.tokens]
