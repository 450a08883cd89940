"""One rank's part of the benchmark of normal mode on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch

from deep_ep_py.tools.bench.config import BenchConfig
from deep_ep_py.tools.bench.gpu_nodes import buffer_options
from deep_ep_py.tools.bench.gpu_size_run import SETS, Event, GpuSizeRun, each
from deep_ep_py.tools.bench.oracle import Oracle
from deep_ep_py.tools.bench.routing import tokens_in_rank

OPS = {
    "layout_notify": "the kernels of get_dispatch_layout and of the count exchange",
    "dispatch": "the kernels of get_dispatch_layout and of a dispatch with top-k ids and weights: layout, notify and "
    "the rows, directly into the outputs (num_worst_tokens: the host waits for nothing)",
    "dispatch_cached": "a dispatch along the routes of an earlier one: only the rows",
    "combine": "combine of the received tensor itself, which all ranks of its node have mapped",
    "combine_private": "combine of an expert output in ordinary memory, which is copied first",
    "pair": "one period of back-to-back dispatch (with layout and notify) -> combine of the received tensor",
}
_ARENA_SLACK = 256 << 20


@dataclass(frozen=True)
class _Set:
    """One rank's inputs for a step, on the GPU."""

    payload: torch.Tensor | tuple[torch.Tensor, torch.Tensor]
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor
    expert_out: torch.Tensor | None
    received: int


class GpuNormalRun(GpuSizeRun):
    """All iterations of one size on one rank."""

    def __init__(self, group: Any, config: BenchConfig, tokens: int, emit: Callable[[Event], None]) -> None:
        import deep_ep_py as deep_ep

        super().__init__(group, config, tokens, emit)
        self._worst = self._inputs.max_received
        buffer_config = deep_ep.Buffer.get_dispatch_config(config.ranks)
        self.buffer = deep_ep.Buffer(
            group,
            num_nvl_bytes=buffer_config.get_nvl_buffer_size_hint(config.row_bytes, config.ranks),
            device="cuda",
            arena_bytes=3 * self._worst * config.payload_bytes + _ARENA_SLACK,
            **buffer_options(config),
        )
        self.buffer.warmup(config.hidden, config.topk, fp8=config.dtype == "fp8")
        self._launch = deep_ep.Config(num_sms=config.num_sms) if config.num_sms else None
        self._sets = [self._set(step) for step in range(SETS)]
        self._timer = self._make_timer(each(self._sets[0].payload, lambda tensor: tensor[:1]), self._launch)
        self._recv: tuple[Any, ...] = ()
        self._combined = torch.empty(0)
        self._cached = torch.empty(0)
        self._pending: Any = None

    def _set(self, step: int) -> _Set:
        inputs, device = self._inputs, self.buffer.device
        inputs.advance(step)
        expert_out = None
        if self._config.combines:
            expert_out = torch.zeros(self._worst, self._config.hidden, dtype=torch.bfloat16, device=device)
            expert_out[: inputs.received].copy_(inputs.expert_out)
        return _Set(
            each(inputs.payload, lambda tensor: tensor.to(device, copy=True)),
            inputs.topk_idx.to(device),
            inputs.topk_weights.to(device),
            expert_out,
            inputs.received,
        )

    def _rows(self) -> list[int]:
        rows: list[int] = self._inputs.counts.sum(dim=(1, 2)).tolist()
        return rows

    def _crossing_rows(self) -> list[int]:
        config, inputs = self._config, self._inputs
        if config.nodes == 1:
            return []
        parts = config.nodes if config.two_hops else config.ranks  # a row goes to each node, or to each rank
        node = self._ranks.rank * config.nodes // config.ranks
        mine = []
        for given in self._sets:
            goes = tokens_in_rank(given.topk_idx.cpu(), config.experts, parts).view(inputs.tokens, config.nodes, -1)
            mine.append(int(goes.sum() - goes[:, node].sum()))
        return [sum(rows) for rows in zip(*self._ranks.all_gather(mine), strict=True)]

    def _release(self) -> None:
        self._recv = ()

    def _iteration(self, which: int) -> None:
        buffer, given = self.buffer, self._sets[which]
        oracle = cache(partial(Oracle, self._inputs, which))

        def received() -> str | None:
            x, idx, weights = (each(part, mine) for part in self._recv[:3])
            return oracle().check_dispatch(x, idx, weights)

        def mine(tensor: torch.Tensor) -> torch.Tensor:
            return tensor[: given.received].cpu()

        self._time("layout_notify", lambda: self._notify(given), buffer.comm_stream)
        self._pending.finish()
        self._pending = None
        self._time("dispatch", lambda: self._dispatch(given))
        rows = self._recv[0][0] if isinstance(self._recv[0], tuple) else self._recv[0]
        self._corrupt("dispatch", rows[: given.received])
        self._check("dispatch", received)
        self._time("dispatch_cached", lambda: self._dispatch_cached(given))
        self._check("dispatch_cached", lambda: oracle().check_dispatch(each(self._cached, mine)))
        self._cached = torch.empty(0)
        if given.expert_out is not None:
            self._combines(given, given.expert_out, oracle, received)
        self._recv = ()

    def _combines(
        self, given: _Set, expert_out: torch.Tensor, oracle: Callable[[], Oracle], received: Callable[[], str | None]
    ) -> None:
        """Measure what follows a dispatch of BF16 rows."""
        self._time("combine", lambda: self._combine(self._recv[0]))
        self._corrupt("combine", self._combined)
        self._check("combine", lambda: oracle().check_combine(self._combined.cpu()))
        self._time("combine_private", lambda: self._combine(expert_out))
        self._check("combine_private", lambda: oracle().check_combine_private(self._combined.cpu()))
        self._time("pairs", lambda: self._pairs(given))
        self._check("pair", lambda: received() or oracle().check_combine(self._combined.cpu()))

    def _layout(self, given: _Set) -> dict[str, Any]:
        per_rank, _, per_expert, in_rank, _ = self.buffer.get_dispatch_layout(given.topk_idx, self._config.experts)
        return {
            "topk_idx": given.topk_idx,
            "topk_weights": given.topk_weights,
            "num_tokens_per_rank": per_rank,
            "is_token_in_rank": in_rank,
            "num_tokens_per_expert": per_expert,
            "num_worst_tokens": self._worst,
            "config": self._launch,
        }

    def _notify(self, given: _Set) -> None:
        self._pending = self.buffer._begin_dispatch(given.payload, **self._layout(given))

    def _dispatch(self, given: _Set) -> None:
        self._recv = ()  # frees its memory for this dispatch
        self._recv = self.buffer.dispatch(given.payload, **self._layout(given))

    def _dispatch_cached(self, given: _Set) -> None:
        self._cached = self.buffer.dispatch(given.payload, handle=self._recv[4], config=self._launch)[0]

    def _combine(self, rows: torch.Tensor) -> None:
        self._combined = self.buffer.combine(rows, self._recv[4], config=self._launch)[0]

    def _pairs(self, given: _Set) -> None:
        for _ in range(self._config.chain):
            self._dispatch(given)
            self._combine(self._recv[0])

    def _corrupt(self, name: str, result: torch.Tensor) -> None:
        if self._is_corrupted(name):
            elements = result.view(torch.int16).view(-1)
            elements[elements.numel() // 2] ^= 1 << 6
