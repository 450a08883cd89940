"""All iterations of one size on one rank, on a GPU: the part common to benchmarks of every mode."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch

from deep_ep_py.tools.bench import gpu_timing
from deep_ep_py.tools.bench.config import BenchConfig
from deep_ep_py.tools.bench.gpu_nodes import transport
from deep_ep_py.tools.bench.inputs import Inputs
from deep_ep_py.tools.bench.kernel_times import MOST_ITERATIONS, KernelTimes
from deep_ep_py.transport.bootstrap.groups import make_bootstrap

SETS = 4
"""Number of sets of inputs, which are used in turn: together they exceed the caches."""

Event = dict[str, Any]


class GpuSizeRun(ABC):
    """All iterations of one size on one rank.

    Parameters
    ----------
    group
        The ranks.
    config
        The run.
    tokens
        The size, in tokens per rank.
    emit
        Receives progress.
    inputs_config
        The configuration of the inputs, if it is not `config`.
    """

    buffer: Any

    def __init__(
        self,
        group: Any,
        config: BenchConfig,
        tokens: int,
        emit: Callable[[Event], None],
        inputs_config: BenchConfig | None = None,
    ) -> None:
        self._ranks = make_bootstrap(group)
        self._config, self._tokens, self._emit = config, tokens, emit
        self._kernel_iterations = min(config.iterations, MOST_ITERATIONS)
        self._steps = config.warmup + self._kernel_iterations + config.iterations
        emit({"kind": "size", "tokens": tokens, "steps": self._steps})
        sets = dataclasses.replace(inputs_config or config, warmup=0, iterations=SETS)
        self._inputs = Inputs(sets, tokens, self._ranks.rank, self._ranks.all_gather)
        self._checked: dict[str, list[str]] = {}
        self._last = False  # the iteration whose results are checked
        self._timer: gpu_timing.GpuTimer | gpu_timing.LinkedTimer
        self._kernels: KernelTimes | None = None  # while kernels are timed, instead of calls

    def run(self) -> dict[str, Any]:
        """Measure, check the last step, and release everything; return the input of `results.report`."""
        config, steps = self._config, self._steps
        joined = transport(self.buffer, config)
        first = steps - config.iterations
        sets = [step % SETS for step in range(config.warmup, config.warmup + config.iterations)]  # of timed iterations
        kernels = KernelTimes(self.buffer, self._ranks)
        for step in range(steps):
            self._kernels = kernels if config.warmup <= step < first else None
            self._timer.recording = step >= first
            self._last = step == steps - 1
            self._iteration(sets[step - first] if step >= first else step % SETS)
            self._emit({"kind": "step", "step": step})
        rows, crossing = self._rows(), self._crossing_rows()
        everyones = self._ranks.all_gather(self._checked)
        result = {
            "tokens": self._tokens,
            "series": self._timer.series(),
            "late_starts": self._timer.late_starts(),
            "kernels": kernels.series(),
            "rows": [rows[which] for which in sets],
            "checks": {name: [error for checks in everyones for error in checks[name]] for name in self._checked},
            "variants": {},
            "transport": joined,
            **({"crossing_rows": [crossing[which] for which in sets]} if crossing else {}),
        }
        self._release()
        self.buffer.destroy()
        return result

    def _time(self, name: str, call: Callable[[], Any], stream: torch.cuda.Stream | None = None) -> None:
        """Time a call or, in the iterations for that, its kernels; the arguments are those of `GpuTimer.time`."""
        if self._kernels is None:
            self._timer.time(name, call, stream)
            return
        self._timer.time(name, self._kernels.observe(call), stream)
        self._kernels.keep(name)

    @abstractmethod
    def _iteration(self, which: int) -> None:
        """Measure every call once, with one set of inputs."""

    @abstractmethod
    def _rows(self) -> list[int]:
        """Return the number of rows that all ranks together receive, for each set of inputs."""

    def _crossing_rows(self) -> list[int]:
        """Return the number of rows that cross nodes in a dispatch, and again in a combine.

        The sum over all ranks, for each set of inputs; empty if unknown.
        """
        return []

    @abstractmethod
    def _release(self) -> None:
        """Release what is in the Buffer."""

    def _check(self, name: str, check: Callable[[], str | None]) -> None:
        """Check a result, in the last iteration only."""
        if not self._last:
            return
        self._emit({"kind": "check", "name": name})
        error = check()
        self._checked[name] = [] if error is None else [f"rank {self._ranks.rank}: {error}"]

    def _is_corrupted(self, name: str) -> bool:
        """Return whether a test asks to change one element of this result now."""
        return self._last and self._config.corrupt == name and self._ranks.rank == self._config.ranks - 1

    def _make_timer(self, row: Any, launch: Any = None) -> gpu_timing.GpuTimer | gpu_timing.LinkedTimer:
        """Make the timer of calls; `row` and `launch` are those of `gpu_timing.make_aligner`."""
        if self._ranks.in_process:
            return gpu_timing.GpuTimer(self._ranks)
        return gpu_timing.LinkedTimer(self._ranks, gpu_timing.make_aligner(self.buffer, row, launch))


def each(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Apply `change` to a tensor, or to each tensor of a tuple."""
    return tuple(change(tensor) for tensor in value) if isinstance(value, tuple) else change(value)
