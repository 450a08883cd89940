"""All iterations of one size on one rank: the part common to benchmarks of every mode."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from deep_ep_py.tools.bench.config import BenchConfig
from deep_ep_py.tools.bench.inputs import Inputs
from deep_ep_py.tools.bench.rank_job import RankContext
from deep_ep_py.tools.bench.timing import Stopwatch
from deep_ep_py.tools.bench.wire import WireMeter


class SizeRun(ABC):
    """All iterations of one size on one rank.

    Parameters
    ----------
    context
        This rank.
    config
        The run.
    tokens
        The size, in tokens per rank.
    inputs_config
        The configuration of the inputs, if it is not `config`.
    """

    def __init__(
        self, context: RankContext, config: BenchConfig, tokens: int, inputs_config: BenchConfig | None = None
    ) -> None:
        self._context, self._config, self._tokens = context, config, tokens
        self._steps = config.warmup + config.iterations
        context.emit({"kind": "size", "tokens": tokens, "steps": self._steps})
        self._inputs = Inputs(inputs_config or config, tokens, context.rank, self._gather)
        self._watch = Stopwatch(context.group)
        self._checked: dict[str, list[str]] = {}
        self._last = False  # the iteration whose results are checked

    def run(self) -> dict[str, Any]:
        """Measure, and return the input of `results.report`; the same on every rank."""
        for step in range(self._steps):
            self._inputs.advance(step)
            self._watch.recording = step >= self._config.warmup
            self._last = step == self._steps - 1
            self._iteration()
            self._context.emit({"kind": "step", "step": step})
        result = {
            "tokens": self._tokens,
            "series": self._watch.series(),
            "late_starts": self._watch.late_starts(),
            "rows": self._rows(),
            "checks": self._all_ranks_checks(),
            "variants": self._variants(),
            "host_us": self._host_times(),
            "wire": self._meter.means(self._config.iterations),
        }
        self._close()
        return result

    @property
    @abstractmethod
    def _meter(self) -> WireMeter:
        """The meter of our Buffer."""

    @abstractmethod
    def _iteration(self) -> None:
        """Measure every call once."""

    @abstractmethod
    def _rows(self) -> list[int]:
        """Return the number of rows that all ranks together receive, for each timed iteration."""

    @abstractmethod
    def _variants(self) -> Mapping[str, tuple[str, ...]]:
        """Return the measured variants of each baseline."""

    def _host_times(self) -> dict[str, dict[str, float]]:
        """Return the microseconds of each call up to its launch, as `HostTimes` does; empty if they are not timed."""
        return {}

    def _time(self, name: str, call: Callable[[], None]) -> None:
        """Time a call of ours, and count what it sends."""
        if self._watch.recording:
            self._meter.count(name, partial(self._watch.time, name, call))
        else:
            self._watch.time(name, call)

    @abstractmethod
    def _close(self) -> None:
        """Release the Buffer."""

    def _check(self, name: str, check: Callable[[], str | None]) -> None:
        """Check a result, in the last iteration only."""
        if not self._last:
            return
        self._context.emit({"kind": "check", "name": name})
        errors = self._checked.setdefault(name, [])
        wrong = check()
        if wrong is not None:
            errors.append(f"rank {self._context.rank}: {wrong}")

    def _is_corrupted(self, name: str) -> bool:
        """Return whether a test asks to change one element of this result now."""
        return self._last and self._config.corrupt == name and self._context.rank == self._context.ranks - 1

    def _barrier(self) -> None:
        """Wait for all ranks if results are checked: some of a baseline's rows come from other ranks."""
        if self._last:
            dist.barrier(group=self._context.group)

    def _gather(self, mine: torch.Tensor) -> list[torch.Tensor]:
        gathered = [torch.empty_like(mine) for _ in range(self._context.ranks)]
        dist.all_gather(gathered, mine, group=self._context.group)
        return gathered

    def _all_ranks_checks(self) -> dict[str, list[str]]:
        gathered: list[Any] = [None] * self._context.ranks
        dist.all_gather_object(gathered, self._checked, group=self._context.group)
        return {name: [error for checks in gathered for error in checks[name]] for name in self._checked}
