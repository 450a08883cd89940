"""One rank's part of the benchmark."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from deep_ep_py.bench.baselines import Baseline, make_baselines
from deep_ep_py.bench.config import BenchConfig
from deep_ep_py.bench.inputs import Inputs
from deep_ep_py.bench.launch import RankContext
from deep_ep_py.bench.low_latency import LowLatencyRun
from deep_ep_py.bench.oracle import Oracle
from deep_ep_py.bench.ours import Ours
from deep_ep_py.bench.timing import Stopwatch


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
        For each size what `results.report` expects; the same on every rank.
    """
    run = LowLatencyRun if config.mode == "low-latency" else _SizeRun
    return [run(context, config, tokens).run() for tokens in config.tokens]


class _SizeRun:
    """All iterations of one size on one rank."""

    def __init__(self, context: RankContext, config: BenchConfig, tokens: int) -> None:
        self._context, self._config, self._tokens = context, config, tokens
        self._steps = config.warmup + config.iterations
        context.emit({"kind": "size", "tokens": tokens, "steps": self._steps})
        self._inputs = Inputs(config, tokens, context.rank, self._gather)
        self._ours = Ours(config, self._inputs, context.group)
        self._baselines = make_baselines(config, self._inputs, context.group)
        self._watch = Stopwatch(context.group)
        self._oracle: Oracle | None = None
        self._checked: dict[str, list[str]] = {}

    def _gather(self, mine: torch.Tensor) -> list[torch.Tensor]:
        gathered = [torch.empty_like(mine) for _ in range(self._context.ranks)]
        dist.all_gather(gathered, mine, group=self._context.group)
        return gathered

    def run(self) -> dict[str, Any]:
        for step in range(self._steps):
            self._inputs.advance(step)
            self._watch.recording = step >= self._config.warmup
            if step == self._steps - 1:
                self._oracle = Oracle(self._inputs, step)
            self._iteration()
            self._context.emit({"kind": "step", "step": step})
        result = {
            "tokens": self._tokens,
            "series": self._watch.series(),
            "late_starts": self._watch.late_starts(),
            "rows": self._inputs.counts[self._config.warmup :].sum(dim=(1, 2)).tolist(),
            "checks": self._all_ranks_checks(),
            "variants": {name: baseline.variants for name, baseline in self._baselines.items()},
        }
        self._ours.release()
        self._ours.buffer.destroy()
        return result

    def _iteration(self) -> None:
        ours, watch = self._ours, self._watch
        watch.time("layout_notify", ours.layout_notify)
        ours.finish_dispatch()
        watch.time("dispatch", ours.dispatch)
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
        """What follows a dispatch of BF16 rows."""
        ours, watch = self._ours, self._watch
        watch.time("combine", ours.combine)
        self._corrupt("combine", ours.combined_x)
        self._check("combine", lambda oracle: oracle.check_combine(ours.combined_x))
        watch.time("combine_private", ours.combine_private)
        self._check("combine_private", lambda oracle: oracle.check_combine_private(ours.combined_x))
        for name, baseline in self._baselines.items():
            for variant in baseline.variants:
                watch.time(f"{name}.combine.{variant}", partial(baseline.combine, variant))
        ours.release()
        watch.time("pairs", ours.pairs)
        self._check("pair", self._check_pair)

    def _baseline_dispatch(self, name: str, baseline: Baseline, variant: str) -> None:
        if self._oracle is not None and name != "gloo":  # gloo knows where it receives only once it has counts
            baseline.received().zero_()
        self._watch.time(f"{name}.dispatch.{variant}", partial(baseline.dispatch, variant))
        if self._oracle is not None:
            dist.barrier(group=self._context.group)  # memcpy's rows come from other ranks
        self._check(f"baseline {name}", lambda oracle: oracle.check_dispatch(baseline.received()))

    def _check_dispatch(self, oracle: Oracle) -> str | None:
        ours = self._ours
        return oracle.check_dispatch(ours.received, ours.recv_topk_idx, ours.recv_topk_weights, ours.tokens_per_expert)

    def _check_pair(self, oracle: Oracle) -> str | None:
        return self._check_dispatch(oracle) or oracle.check_combine(self._ours.combined_x)

    def _check(self, name: str, check: Callable[[Oracle], str | None]) -> None:
        """Check a result in the last iteration, not in the others."""
        if self._oracle is None:
            return
        self._context.emit({"kind": "check", "name": name})
        wrong = check(self._oracle)
        errors = self._checked.setdefault(name, [])
        if wrong is not None:
            errors.append(f"rank {self._context.rank}: {wrong}")

    def _corrupt(self, name: str, result: torch.Tensor) -> None:
        """Change one element where a test asks for it."""
        if self._oracle is None or self._config.corrupt != name or self._context.rank != self._context.ranks - 1:
            return
        elements = result.view(torch.int16).view(-1)
        elements[elements.numel() // 2] ^= 1 << 6

    def _all_ranks_checks(self) -> dict[str, list[str]]:
        gathered: list[Any] = [None] * self._context.ranks
        dist.all_gather_object(gathered, self._checked, group=self._context.group)
        return {name: [error for checks in gathered for error in checks[name]] for name in self._checked}
