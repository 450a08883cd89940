"""One rank's part of the benchmark of low-latency mode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from deep_ep_py.bench.config import BenchConfig
from deep_ep_py.bench.inputs import Inputs
from deep_ep_py.bench.launch import RankContext
from deep_ep_py.bench.low_latency_baselines import SelectionBaseline, make_baselines
from deep_ep_py.bench.low_latency_oracle import Selections
from deep_ep_py.bench.timing import Stopwatch

# What each timed call covers; goes into the report.
OPS = {
    "dispatch": "low_latency_dispatch: rows by expert, with output allocation",
    "combine": "low_latency_combine of the received tensor itself, which mapped ranks read where it is",
    "combine_private": "low_latency_combine of results in ordinary memory of their rank",
    "dispatch_send": "the sending half of a dispatch with a receive hook: the call",
    "dispatch_receive": "its other half: the hook",
    "combine_send": "the sending half of a combine of the received tensor with a receive hook",
    "combine_receive": "its other half",
    "pair": "one period of back-to-back dispatch -> combine of the received tensor",
}
_ARENA_SLACK = 64 << 20


class LowLatencyCalls:
    """Low-latency dispatch and combine through a `Buffer`, which also makes normal-mode calls for comparison."""

    def __init__(self, config: BenchConfig, inputs: Inputs, group: dist.ProcessGroup) -> None:
        import deep_ep_py as deep_ep

        self._config, self._inputs = config, inputs
        normal = deep_ep.Buffer.get_dispatch_config(config.ranks).get_nvl_buffer_size_hint(
            2 * config.hidden, config.ranks
        )
        size = deep_ep.Buffer.get_low_latency_rdma_size_hint(
            inputs.tokens, config.hidden, config.ranks, config.experts, num_topk=config.topk
        )
        packed = config.experts * inputs.tokens * 2 * config.hidden
        self.buffer = deep_ep.Buffer(
            group,
            normal,
            size,
            low_latency_mode=True,
            device="cpu",
            ranks_per_node=config.ranks // config.nodes,
            nic=deep_ep.NicOptions(blocks=1024, mtu=1 << 20, in_flight=16),
            arena_bytes=2 * packed + _ARENA_SLACK,
        )
        if config.num_sms:
            self.buffer._engine.device.blocks = config.num_sms
        self.packed: torch.Tensor | tuple[torch.Tensor, torch.Tensor] = torch.empty(0)
        self.counts = torch.empty(0)
        self.combined_x = torch.empty(0)
        # The results of experts: the pages of rows that are never received cost nothing.
        self.results = torch.empty(
            (config.experts // config.ranks, config.ranks * inputs.tokens, config.hidden), dtype=torch.bfloat16
        )
        self._handle: Any = None
        self._hook: Any = None

    @property
    def recv_x(self) -> torch.Tensor:
        """The received rows."""
        return self.packed[0] if isinstance(self.packed, tuple) else self.packed

    def release(self) -> None:
        """Let go of the received tensor, so that the next dispatch finds its memory free."""
        self.packed, self._handle = torch.empty(0), None

    def dispatch(self, hook: bool = False) -> None:
        """Dispatch, or send alone."""
        inputs, config = self._inputs, self._config
        self.packed, self.counts, self._handle, _, self._hook = self.buffer.low_latency_dispatch(
            inputs.x,
            inputs.topk_idx,
            inputs.tokens,
            config.experts,
            use_fp8=config.dtype == "fp8",
            return_recv_hook=hook,
        )

    def receive(self) -> None:
        """Receive what the latest call with a hook has sent for."""
        self._hook()
        self._hook = None

    def combine(self, x: torch.Tensor, hook: bool = False) -> None:
        """Combine, or send alone."""
        inputs = self._inputs
        self.combined_x, _, self._hook = self.buffer.low_latency_combine(
            x, inputs.topk_idx, inputs.topk_weights, self._handle, return_recv_hook=hook
        )

    def pairs(self) -> None:
        """As many dispatch -> combine pairs as the run chains, with nothing between them."""
        for _ in range(self._config.chain):
            self.release()
            self.dispatch()
            self.combine(self.results if self._config.dtype == "fp8" else self.recv_x)


class LowLatencyRun:
    """All iterations of one size on one rank.

    Parameters
    ----------
    context
        This rank.
    config
        The run.
    tokens
        Of each rank: the size.
    """

    def __init__(self, context: RankContext, config: BenchConfig, tokens: int) -> None:
        self._context, self._config, self._tokens = context, config, tokens
        self._steps = config.warmup + config.iterations
        context.emit({"kind": "size", "tokens": tokens, "steps": self._steps})
        # Rows are cast inside dispatch.
        self._inputs = Inputs(replace(config, dtype="bf16"), tokens, context.rank, self._gather)
        self._calls = LowLatencyCalls(config, self._inputs, context.group)
        self._baselines: dict[str, SelectionBaseline] = make_baselines(config, self._inputs, context.group)
        self._watch = Stopwatch(context.group)
        self._checked: dict[str, list[str]] = {}
        self._last = False

    def _gather(self, mine: torch.Tensor) -> list[torch.Tensor]:
        gathered = [torch.empty_like(mine) for _ in range(self._context.ranks)]
        dist.all_gather(gathered, mine, group=self._context.group)
        return gathered

    def run(self) -> dict[str, Any]:
        """Measure, and return what `results.report` expects; the same on every rank."""
        for step in range(self._steps):
            self._inputs.advance(step)
            self._watch.recording = step >= self._config.warmup
            self._last = step == self._steps - 1
            self._iteration()
            self._context.emit({"kind": "step", "step": step})
        rows = self._config.ranks * self._tokens * self._config.topk
        result = {
            "tokens": self._tokens,
            "series": self._watch.series(),
            "late_starts": self._watch.late_starts(),
            "rows": [rows] * self._config.iterations,
            "checks": self._all_ranks_checks(),
            "variants": {name: baseline.variants for name, baseline in self._baselines.items()},
        }
        self._calls.release()
        self._calls.buffer.destroy()
        return result

    def _iteration(self) -> None:
        calls, watch, selections = self._calls, self._watch, Selections(self._inputs)
        fp8 = self._config.dtype == "fp8"
        watch.time("dispatch", calls.dispatch)
        self._corrupt("dispatch", calls.recv_x)
        self._check("dispatch", lambda: selections.check_dispatch(calls.packed, calls.counts))
        selections.copy_rows(calls.results)
        shared = calls.results if fp8 else calls.recv_x
        for name, baseline in self._baselines.items():
            baseline.prepare(calls.buffer, shared, selections)
            for variant in baseline.variants:
                watch.time(f"{name}.dispatch.{variant}", partial(baseline.dispatch, variant))
            self._barrier()
            self._check(f"baseline {name}", baseline.check)
        watch.time("combine", lambda: calls.combine(shared))
        self._corrupt("combine", calls.combined_x)
        self._check("combine", lambda: selections.check_combine(calls.combined_x))
        watch.time("combine_private", lambda: calls.combine(calls.results))
        self._check("combine_private", lambda: selections.check_combine(calls.combined_x))
        for name, baseline in self._baselines.items():
            for variant in baseline.variants:
                watch.time(f"{name}.combine.{variant}", partial(baseline.combine, variant))
        self._halves(shared)
        calls.release()
        watch.time("pairs", calls.pairs)
        self._check("pair", lambda: selections.check_combine(calls.combined_x))
        calls.release()

    def _halves(self, shared: torch.Tensor) -> None:
        calls, watch = self._calls, self._watch
        calls.release()
        watch.time("dispatch_send", lambda: calls.dispatch(hook=True))
        watch.time("dispatch_receive", calls.receive)
        results = shared if self._config.dtype == "fp8" else calls.recv_x
        watch.time("combine_send", lambda: calls.combine(results, hook=True))
        watch.time("combine_receive", calls.receive)

    def _barrier(self) -> None:
        if self._last:
            dist.barrier(group=self._context.group)  # memcpy's rows come from other ranks

    def _check(self, name: str, check: Callable[[], str | None]) -> None:
        """Check a result in the last iteration, not in the others."""
        if not self._last:
            return
        self._context.emit({"kind": "check", "name": name})
        errors = self._checked.setdefault(name, [])
        wrong = check()
        if wrong is not None:
            errors.append(f"rank {self._context.rank}: {wrong}")

    def _corrupt(self, name: str, result: torch.Tensor) -> None:
        """Change one element where a test asks for it."""
        if self._last and self._config.corrupt == name and self._context.rank == self._context.ranks - 1:
            rows = result[int(self._calls.counts.argmax())] if name == "dispatch" else result
            rows.view(torch.uint8).view(-1)[1] ^= 1 << 2

    def _all_ranks_checks(self) -> dict[str, list[str]]:
        gathered: list[Any] = [None] * self._context.ranks
        dist.all_gather_object(gathered, self._checked, group=self._context.group)
        return {name: [error for checks in gathered for error in checks[name]] for name in self._checked}
