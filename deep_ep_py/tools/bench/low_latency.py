"""One rank's part of the benchmark of low-latency mode."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist

from deep_ep_py.tools.bench.config import BenchConfig
from deep_ep_py.tools.bench.host_time import HostTimes
from deep_ep_py.tools.bench.inputs import Inputs
from deep_ep_py.tools.bench.low_latency_baselines import SelectionBaseline, make_baselines
from deep_ep_py.tools.bench.low_latency_oracle import Selections
from deep_ep_py.tools.bench.rank_job import RankContext
from deep_ep_py.tools.bench.size_run import SizeRun
from deep_ep_py.tools.bench.wire import WireMeter

# The scope of each timed call, for the report.
OPS = {
    "dispatch": "low_latency_dispatch: rows by expert, with output allocation",
    "combine": "low_latency_combine of the received tensor itself, which mapped ranks read in place",
    "combine_private": "low_latency_combine of results in ordinary memory of their rank",
    "dispatch_send": "the sending half of a dispatch with a receive hook: the call",
    "dispatch_receive": "its receiving half: the hook",
    "combine_send": "the sending half of a combine of the received tensor with a receive hook",
    "combine_receive": "its receiving half",
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
            fabric=config.fabric,
            nic=deep_ep.NicOptions(blocks=1024, mtu=1 << 20, in_flight=16),
            # Two are alive at a time, and free memory is not always contiguous.
            arena_bytes=3 * packed + _ARENA_SLACK,
        )
        self.host = HostTimes(self.buffer)
        self.packed: torch.Tensor | tuple[torch.Tensor, torch.Tensor] = torch.empty(0)
        self.counts = torch.empty(0)
        self.combined_x = torch.empty(0)
        # The experts' results; pages of rows that are never received cost nothing.
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
        """Release the received tensor, so that the next dispatch can reuse its memory."""
        self.packed, self._handle = torch.empty(0), None

    def dispatch(self, hook: bool = False) -> None:
        """Dispatch, or only send."""
        inputs, config = self._inputs, self._config
        self.packed, self.counts, self._handle, _, self._hook = self.host.time(
            "dispatch",
            self.buffer.low_latency_dispatch,
            inputs.x,
            inputs.topk_idx,
            inputs.tokens,
            config.experts,
            use_fp8=config.dtype == "fp8",
            return_recv_hook=hook,
        )

    def receive(self) -> None:
        """Run the receiving half of the latest call with a hook."""
        self._hook()
        self._hook = None

    def combine(self, x: torch.Tensor, hook: bool = False) -> None:
        """Combine, or only send."""
        inputs = self._inputs
        self.combined_x, _, self._hook = self.host.time(
            "combine",
            self.buffer.low_latency_combine,
            x,
            inputs.topk_idx,
            inputs.topk_weights,
            self._handle,
            return_recv_hook=hook,
        )

    def pairs(self) -> None:
        """Run as many dispatch -> combine pairs as the run chains, back to back."""
        for _ in range(self._config.chain):
            self.release()
            self.dispatch()
            self.combine(self.results if self._config.dtype == "fp8" else self.recv_x)


class LowLatencyRun(SizeRun):
    """All iterations of one size on one rank."""

    def __init__(self, context: RankContext, config: BenchConfig, tokens: int) -> None:
        super().__init__(context, config, tokens, replace(config, dtype="bf16"))  # rows are cast inside dispatch
        self._calls = LowLatencyCalls(config, self._inputs, context.group)
        self._baselines: dict[str, SelectionBaseline] = make_baselines(config, self._inputs, context.group)

    @cached_property
    def _meter(self) -> WireMeter:
        return WireMeter(self._calls.buffer, self._context.group)

    def _rows(self) -> list[int]:
        return [self._config.ranks * self._tokens * self._config.topk] * self._config.iterations

    def _variants(self) -> dict[str, tuple[str, ...]]:
        return {name: baseline.variants for name, baseline in self._baselines.items()}

    def _host_times(self) -> dict[str, dict[str, float]]:
        return self._calls.host.summaries(self._context.group)

    def _close(self) -> None:
        self._calls.release()
        self._calls.buffer.destroy()

    def _iteration(self) -> None:
        calls, watch, selections = self._calls, self._watch, Selections(self._inputs)
        fp8 = self._config.dtype == "fp8"
        self._time("dispatch", calls.dispatch)
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
        self._time("combine", lambda: calls.combine(shared))
        self._corrupt("combine", calls.combined_x)
        self._check("combine", lambda: selections.check_combine(calls.combined_x))
        self._time("combine_private", lambda: calls.combine(calls.results))
        self._check("combine_private", lambda: selections.check_combine(calls.combined_x))
        for name, baseline in self._baselines.items():
            for variant in baseline.variants:
                watch.time(f"{name}.combine.{variant}", partial(baseline.combine, variant))
        self._halves(shared)
        calls.release()
        calls.host.recording = watch.recording
        watch.time("pairs", calls.pairs)
        calls.host.recording = False
        self._check("pair", lambda: selections.check_combine(calls.combined_x))
        calls.release()

    def _halves(self, shared: torch.Tensor) -> None:
        calls = self._calls
        calls.release()
        self._time("dispatch_send", lambda: calls.dispatch(hook=True))
        self._time("dispatch_receive", calls.receive)
        results = shared if self._config.dtype == "fp8" else calls.recv_x
        self._time("combine_send", lambda: calls.combine(results, hook=True))
        self._time("combine_receive", calls.receive)

    def _corrupt(self, name: str, result: torch.Tensor) -> None:
        if self._is_corrupted(name):
            rows = result[int(self._calls.counts.argmax())] if name == "dispatch" else result
            rows.view(torch.uint8).view(-1)[1] ^= 1 << 2
