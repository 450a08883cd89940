"""One rank's part of the benchmark of low-latency mode on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from deep_ep_py.tools.bench.config import BenchConfig
from deep_ep_py.tools.bench.gpu_nodes import buffer_options
from deep_ep_py.tools.bench.gpu_size_run import SETS, Event, GpuSizeRun
from deep_ep_py.tools.bench.low_latency_oracle import Selections

OPS = {
    "dispatch": "low_latency_dispatch: one kernel, from the tokens' rows to rows by expert",
    "combine": "low_latency_combine of results in ordinary memory, which are pushed: one kernel",
    "combine_zero_copy": "low_latency_combine of results in the tensor from get_next_low_latency_combine_buffer, where "
    "owners on the same node read them",
    "dispatch_send": "the sending half of a dispatch with a receive hook",
    "dispatch_receive": "its receiving half, queued by the hook once all ranks' sending halves have ended",
    "combine_send": "the sending half of a combine of results in ordinary memory with a receive hook",
    "combine_receive": "its receiving half",
    "pair": "one period of back-to-back dispatch -> combine of results in ordinary memory",
}
_ARENA_SLACK = 64 << 20


@dataclass(frozen=True)
class _Set:
    """One rank's inputs for a step, on the GPU."""

    x: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor


class GpuLowLatencyRun(GpuSizeRun):
    """All iterations of one size on one rank."""

    def __init__(self, group: Any, config: BenchConfig, tokens: int, emit: Callable[[Event], None]) -> None:
        import deep_ep_py as deep_ep

        super().__init__(group, config, tokens, emit, replace(config, dtype="bf16"))  # rows are cast inside dispatch
        normal = deep_ep.Buffer.get_dispatch_config(config.ranks).get_nvl_buffer_size_hint(
            2 * config.hidden, config.ranks
        )
        size = deep_ep.Buffer.get_low_latency_rdma_size_hint(
            tokens, config.hidden, config.ranks, config.experts, num_topk=config.topk
        )
        shape = (config.experts // config.ranks, config.ranks * tokens, config.hidden)
        results_bytes = shape[0] * shape[1] * shape[2] * torch.bfloat16.itemsize
        self.buffer = deep_ep.Buffer(
            group,
            normal,  # normal-mode dispatches align ranks that have a GPU each
            size,
            low_latency_mode=True,
            device="cuda",
            arena_bytes=2 * results_bytes + _ARENA_SLACK,  # zero-copy combines alternate between two
            **buffer_options(config),
        )
        self.buffer.warmup(config.hidden, config.topk)
        device = self.buffer.device
        self._sets = [self._set(step) for step in range(SETS)]
        # The experts' results. In the last iteration, which is checked, they are the received rows.
        self._results = torch.zeros(shape, dtype=torch.bfloat16, device=device)
        self._packed: torch.Tensor | tuple[torch.Tensor, torch.Tensor] = torch.empty(0)
        self._counts = self._combined = torch.empty(0)
        self._handle: Any = None
        self._hook: Any = None
        self._timer = self._make_timer(self._sets[0].x[:1])

    def _set(self, step: int) -> _Set:
        inputs, device = self._inputs, self.buffer.device
        inputs.advance(step)
        return _Set(inputs.x.to(device, copy=True), inputs.topk_idx.to(device), inputs.topk_weights.to(device))

    def _rows(self) -> list[int]:
        return [self._config.ranks * self._tokens * self._config.topk] * SETS

    def _release(self) -> None:
        self._packed, self._handle, self._hook = torch.empty(0), None, None

    def _iteration(self, which: int) -> None:
        given = self._sets[which]
        self._time("dispatch", lambda: self._dispatch(given))
        self._corrupt("dispatch")
        if self._last:
            self._inputs.advance(which)
            selections = Selections(self._inputs)
            self._check("dispatch", lambda: selections.check_dispatch(self._packed, self._counts.cpu()))
            selections.copy_rows(self._results)

        def combined() -> str | None:
            return selections.check_combine(self._combined.cpu())

        self._time("combine", lambda: self._combine(given, self._results))
        self._corrupt("combine")
        self._check("combine", combined)
        view = self.buffer.get_next_low_latency_combine_buffer(self._handle)
        if self._last:
            view.copy_(self._results)
        self._time("combine_zero_copy", lambda: self._combine(given, view, zero_copy=True))
        self._check("combine_zero_copy", combined)
        self._time("dispatch_send", lambda: self._dispatch(given, hook=True))
        self._time("dispatch_receive", self._receive)
        self._check("dispatch_halves", lambda: selections.check_dispatch(self._packed, self._counts.cpu()))
        self._time("combine_send", lambda: self._combine(given, self._results, hook=True))
        self._time("combine_receive", self._receive)
        self._check("combine_halves", combined)
        self._time("pairs", lambda: self._pairs(given))
        self._check("pair", combined)

    def _dispatch(self, given: _Set, hook: bool = False) -> None:
        config = self._config
        self._release()  # frees its memory for this dispatch
        self._packed, self._counts, self._handle, _, self._hook = self.buffer.low_latency_dispatch(
            given.x,
            given.topk_idx,
            self._tokens,
            config.experts,
            use_fp8=config.dtype == "fp8",
            return_recv_hook=hook,
        )

    def _combine(self, given: _Set, results: torch.Tensor, zero_copy: bool = False, hook: bool = False) -> None:
        self._combined, _, self._hook = self.buffer.low_latency_combine(
            results, given.topk_idx, given.topk_weights, self._handle, zero_copy=zero_copy, return_recv_hook=hook
        )

    def _receive(self) -> None:
        self._hook()
        self._hook = None

    def _pairs(self, given: _Set) -> None:
        for _ in range(self._config.chain):
            self._dispatch(given)
            self._combine(given, self._results)

    def _corrupt(self, name: str) -> None:
        if self._is_corrupted(name):
            rows = self._packed[0] if isinstance(self._packed, tuple) else self._packed
            result = rows[int(self._counts.argmax())] if name == "dispatch" else self._combined
            result.view(torch.uint8).view(-1)[1] ^= 1 << 2
