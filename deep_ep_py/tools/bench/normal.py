"""One rank's part of the benchmark of normal mode."""

from __future__ import annotations

from functools import cached_property, partial

import torch

from deep_ep_py.tools.bench.baselines import Baseline, make_baselines
from deep_ep_py.tools.bench.config import BenchConfig
from deep_ep_py.tools.bench.oracle import Oracle
from deep_ep_py.tools.bench.ours import Ours
from deep_ep_py.tools.bench.rank_job import RankContext
from deep_ep_py.tools.bench.size_run import SizeRun
from deep_ep_py.tools.bench.wire import WireMeter


class NormalRun(SizeRun):
    """All iterations of one size on one rank."""

    def __init__(self, context: RankContext, config: BenchConfig, tokens: int) -> None:
        super().__init__(context, config, tokens)
        self._ours = Ours(config, self._inputs, context.group)
        self._baselines = make_baselines(config, self._inputs, context.group)

    @cached_property
    def _meter(self) -> WireMeter:
        return WireMeter(self._ours.buffer, self._context.group)

    def _rows(self) -> list[int]:
        rows: list[int] = self._inputs.counts[self._config.warmup :].sum(dim=(1, 2)).tolist()
        return rows

    def _variants(self) -> dict[str, tuple[str, ...]]:
        return {name: baseline.variants for name, baseline in self._baselines.items()}

    def _close(self) -> None:
        self._ours.release()
        self._ours.buffer.destroy()

    @cached_property
    def _oracle(self) -> Oracle:
        """The oracle of the last iteration."""
        return Oracle(self._inputs, self._steps - 1)

    def _iteration(self) -> None:
        ours = self._ours
        self._time("layout_notify", ours.layout_notify)
        ours.finish_dispatch()
        self._time("dispatch", ours.dispatch)
        self._corrupt("dispatch", ours.recv_x)
        self._check("dispatch", self._check_dispatch)
        for name, baseline in self._baselines.items():
            baseline.prepare(ours)
            for variant in baseline.variants:
                self._baseline_dispatch(name, baseline, variant)
        if self._config.combines:
            self._combines()
        ours.release()

    def _combines(self) -> None:
        """Measure what follows a dispatch of BF16 rows."""
        ours, watch = self._ours, self._watch
        self._time("combine", ours.combine)
        self._corrupt("combine", ours.combined_x)
        self._check("combine", lambda: self._oracle.check_combine(ours.combined_x))
        self._time("combine_private", ours.combine_private)
        self._check("combine_private", lambda: self._oracle.check_combine_private(ours.combined_x))
        for name, baseline in self._baselines.items():
            for variant in baseline.variants:
                watch.time(f"{name}.combine.{variant}", partial(baseline.combine, variant))
        ours.release()
        watch.time("pairs", ours.pairs)
        self._check("pair", self._check_pair)

    def _baseline_dispatch(self, name: str, baseline: Baseline, variant: str) -> None:
        if self._last and name != "gloo":  # gloo knows where it receives only once it has the counts
            baseline.received().zero_()
        self._watch.time(f"{name}.dispatch.{variant}", partial(baseline.dispatch, variant))
        self._barrier()
        self._check(f"baseline {name}", lambda: self._oracle.check_dispatch(baseline.received()))

    def _check_dispatch(self) -> str | None:
        ours = self._ours
        return self._oracle.check_dispatch(
            ours.received, ours.recv_topk_idx, ours.recv_topk_weights, ours.tokens_per_expert
        )

    def _check_pair(self) -> str | None:
        return self._check_dispatch() or self._oracle.check_combine(self._ours.combined_x)

    def _corrupt(self, name: str, result: torch.Tensor) -> None:
        if self._is_corrupted(name):
            elements = result.view(torch.int16).view(-1)
            elements[elements.numel() // 2] ^= 1 << 6
