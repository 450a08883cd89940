"""The benchmark on GPUs. Ranks are threads of this process that share one GPU, each with a stream and its part of it;
or, where torchrun has started them, processes with a GPU each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from deep_ep_py.bench import gpu_timing
from deep_ep_py.bench.config import BenchConfig
from deep_ep_py.bench.gpu_ranks import gpu_per_rank
from deep_ep_py.bench.inputs import Inputs
from deep_ep_py.bench.launch import require_torchrun_ranks, under_torchrun
from deep_ep_py.bench.oracle import Oracle
from deep_ep_py.bootstrap.groups import make_bootstrap

OPS = {
    "layout_notify": "the kernels of get_dispatch_layout and of the count exchange",
    "dispatch": "the kernels of get_dispatch_layout and of a dispatch with top-k ids and weights: layout, notify and "
    "the rows, straight into the outputs (num_worst_tokens: the host waits for nothing)",
    "dispatch_cached": "a dispatch along the routes of an earlier one: the rows alone",
    "combine": "combine of the received tensor itself, which all ranks have mapped",
    "combine_private": "combine of an expert output in ordinary memory, which is copied first",
    "pair": "one period of back-to-back dispatch (with layout and notify) -> combine of the received tensor",
}
# Sets of inputs that take turns: together more than the caches hold.
_SETS = 4
_ARENA_SLACK = 256 << 20

Event = dict[str, Any]


def run_bench_on_gpu(config: BenchConfig, on_event: Callable[[Event], None]) -> list[dict[str, Any]]:
    """Measure all sizes: on one GPU, which the ranks share, or on torchrun's ranks.

    Parameters
    ----------
    config
        The run.
    on_event
        Gets rank 0's progress.

    Returns
    -------
    list of dict
        For each size what `results.report` expects; the same on every rank.

    Raises
    ------
    ValueError
        Torchrun has started another number of ranks, or there are fewer GPUs.
    """
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
    return [_SizeRun(group, config, tokens, emit).run() for tokens in config.tokens]


def _discard(event: Event) -> None:
    del event


def _each(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Change a tensor, or each of a tuple."""
    return tuple(change(tensor) for tensor in value) if isinstance(value, tuple) else change(value)


@dataclass(frozen=True)
class _Set:
    """One rank's inputs of a step, on the GPU."""

    payload: torch.Tensor | tuple[torch.Tensor, torch.Tensor]
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor
    expert_out: torch.Tensor | None
    received: int


class _SizeRun:
    """All iterations of one size on one rank."""

    def __init__(self, group: Any, config: BenchConfig, tokens: int, emit: Callable[[Event], None]) -> None:
        import deep_ep_py as deep_ep

        self._ranks = make_bootstrap(group)
        self._config, self._tokens, self._emit = config, tokens, emit
        emit({"kind": "size", "tokens": tokens, "steps": config.warmup + config.iterations})
        sets = dataclasses.replace(config, warmup=0, iterations=_SETS)
        self._inputs = inputs = Inputs(sets, tokens, self._ranks.rank, self._ranks.all_gather)
        self._worst = inputs.max_received
        buffer_config = deep_ep.Buffer.get_dispatch_config(config.ranks)
        self.buffer = deep_ep.Buffer(
            group,
            num_nvl_bytes=buffer_config.get_nvl_buffer_size_hint(config.row_bytes, config.ranks),
            device="cuda",
            arena_bytes=3 * self._worst * config.payload_bytes + _ARENA_SLACK,
        )
        self.buffer.warmup(config.hidden, config.topk, fp8=config.dtype == "fp8")
        self._launch = deep_ep.Config(num_sms=config.num_sms) if config.num_sms else None
        self._sets = [self._set(step) for step in range(_SETS)]
        self._timer = self._make_timer()
        self._recv: tuple[Any, ...] = ()
        self._combined = torch.empty(0)
        self._cached = torch.empty(0)
        self._pending: Any = None

    def _make_timer(self) -> gpu_timing.GpuTimer | gpu_timing.LinkedTimer:
        if self._ranks.in_process:
            return gpu_timing.GpuTimer(self._ranks)
        row = _each(self._sets[0].payload, lambda tensor: tensor[:1])
        return gpu_timing.LinkedTimer(self._ranks, gpu_timing.make_aligner(self.buffer, row, self._launch))

    def _set(self, step: int) -> _Set:
        inputs, device = self._inputs, self.buffer.device
        inputs.advance(step)
        expert_out = None
        if self._config.combines:
            expert_out = torch.zeros(self._worst, self._config.hidden, dtype=torch.bfloat16, device=device)
            expert_out[: inputs.received].copy_(inputs.expert_out)
        return _Set(
            _each(inputs.payload, lambda tensor: tensor.to(device, copy=True)),
            inputs.topk_idx.to(device),
            inputs.topk_weights.to(device),
            expert_out,
            inputs.received,
        )

    def run(self) -> dict[str, Any]:
        """Measure, check the last step, and let go of everything."""
        config = self._config
        steps = config.warmup + config.iterations
        for step in range(steps):
            self._timer.recording = step >= config.warmup
            oracle = Oracle(self._inputs, step % _SETS) if step == steps - 1 else None
            checked = self._iteration(self._sets[step % _SETS], oracle)
            self._emit({"kind": "step", "step": step})
        series = self._timer.series()
        rows = self._inputs.counts.sum(dim=(1, 2)).tolist()
        everyones = self._ranks.all_gather(checked)
        result = {
            "tokens": self._tokens,
            "series": series,
            "late_starts": self._timer.late_starts(),
            "rows": [rows[step % _SETS] for step in range(config.warmup, steps)],
            "checks": {name: [error for checks in everyones for error in checks[name]] for name in checked},
            "variants": {},
        }
        self._recv = ()
        self.buffer.destroy()
        return result

    def _iteration(self, given: _Set, oracle: Oracle | None) -> dict[str, list[str]]:
        buffer, timer = self.buffer, self._timer
        checked: dict[str, list[str]] = {}

        def check(name: str, wrong: Callable[[Oracle], str | None]) -> None:
            if oracle is not None:
                self._emit({"kind": "check", "name": name})
                error = wrong(oracle)
                checked[name] = [] if error is None else [f"rank {self._ranks.rank}: {error}"]

        def received(oracle: Oracle) -> str | None:
            x, idx, weights = (_each(part, mine) for part in self._recv[:3])
            return oracle.check_dispatch(x, idx, weights)

        def mine(tensor: torch.Tensor) -> torch.Tensor:
            return tensor[: given.received].cpu()

        timer.time("layout_notify", lambda: self._notify(given), buffer.comm_stream)
        self._pending.finish()
        self._pending = None
        timer.time("dispatch", lambda: self._dispatch(given))
        rows = self._recv[0][0] if isinstance(self._recv[0], tuple) else self._recv[0]
        self._corrupt("dispatch", oracle, rows[: given.received])
        check("dispatch", received)
        timer.time("dispatch_cached", lambda: self._dispatch_cached(given))
        check("dispatch_cached", lambda oracle: oracle.check_dispatch(_each(self._cached, mine)))
        self._cached = torch.empty(0)
        if given.expert_out is not None:
            self._combines(given, given.expert_out, oracle, check, received)
        self._recv = ()
        return checked

    def _combines(
        self,
        given: _Set,
        expert_out: torch.Tensor,
        oracle: Oracle | None,
        check: Callable[[str, Callable[[Oracle], str | None]], None],
        received: Callable[[Oracle], str | None],
    ) -> None:
        """What follows a dispatch of BF16 rows."""
        timer = self._timer
        timer.time("combine", lambda: self._combine(self._recv[0]))
        self._corrupt("combine", oracle, self._combined)
        check("combine", lambda oracle: oracle.check_combine(self._combined.cpu()))
        timer.time("combine_private", lambda: self._combine(expert_out))
        check("combine_private", lambda oracle: oracle.check_combine_private(self._combined.cpu()))
        timer.time("pairs", lambda: self._pairs(given))
        check("pair", lambda oracle: received(oracle) or oracle.check_combine(self._combined.cpu()))

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
        self._recv = ()  # so that its memory is there for this one
        self._recv = self.buffer.dispatch(given.payload, **self._layout(given))

    def _dispatch_cached(self, given: _Set) -> None:
        self._cached = self.buffer.dispatch(given.payload, handle=self._recv[4], config=self._launch)[0]

    def _combine(self, rows: torch.Tensor) -> None:
        self._combined = self.buffer.combine(rows, self._recv[4], config=self._launch)[0]

    def _pairs(self, given: _Set) -> None:
        for _ in range(self._config.chain):
            self._dispatch(given)
            self._combine(self._recv[0])

    def _corrupt(self, name: str, oracle: Oracle | None, result: torch.Tensor) -> None:
        """Change one element where a test asks for it."""
        if oracle is None or self._config.corrupt != name or self._ranks.rank != self._config.ranks - 1:
            return
        elements = result.view(torch.int16).view(-1)
        elements[elements.numel() // 2] ^= 1 << 6
