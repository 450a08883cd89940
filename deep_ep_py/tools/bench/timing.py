"""Timing of all ranks together, one time per iteration."""

from __future__ import annotations

import gc
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")

BOUNDARY = (
    "All ranks of the node start together: they agree on an instant and sleep until it. A sample is the time from the "
    "first rank's start to the slowest rank's return, on the node's one monotonic clock; the figure is the median over "
    "the timed iterations. Host work of the call (Python, launches, waiting for counts) is inside. "
    "Ranks that have returned sleep until all have."
)
# Longer than the agreement takes to reach the last rank, even with several ranks per core.
_MARGIN_NS = 12_000_000
_LATE_NS = 1_000_000


class Stopwatch:
    """Times calls that all ranks make together.

    Parameters
    ----------
    group
        The ranks, all on one node, so that they share one monotonic clock.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._samples: dict[str, list[tuple[int, int]]] = defaultdict(list)
        self._late = 0
        self.recording = False
        """Whether samples are kept: not while warming up."""

    def time(self, name: str, call: Callable[[], T]) -> T:
        """Start a call together with the other ranks and time it.

        Parameters
        ----------
        name
            The series that the sample belongs to.
        call
            The call to time.

        Returns
        -------
        object
            The result of the call.
        """
        instant = torch.tensor([time.monotonic_ns() + _MARGIN_NS])
        gc.disable()
        try:
            dist.all_reduce(instant, op=dist.ReduceOp.MAX, group=self._group)
            start = int(instant.item())
            time.sleep(max(0, start - time.monotonic_ns()) / 1e9)
            begin = time.monotonic_ns()
            result = call()
            end = time.monotonic_ns()
            # Ranks that have returned sleep here; otherwise they would check results on cores that others still need.
            dist.barrier(group=self._group)
        finally:
            gc.enable()
        if self.recording:
            self._samples[name].append((begin, end))
            self._late += begin - start > _LATE_NS
        return result

    def series(self) -> dict[str, list[float]]:
        """Gather the samples of all ranks.

        Returns
        -------
        dict
            For each name, the milliseconds of each iteration, the same on every rank.
        """
        spans: dict[str, list[float]] = {}
        for name, samples in self._samples.items():
            first, last = torch.tensor(samples, dtype=torch.int64).unbind(dim=1)
            first, last = first.contiguous(), last.contiguous()
            dist.all_reduce(first, op=dist.ReduceOp.MIN, group=self._group)
            dist.all_reduce(last, op=dist.ReduceOp.MAX, group=self._group)
            spans[name] = ((last - first).to(torch.float64) / 1e6).tolist()
        return spans

    def late_starts(self) -> int:
        """Return how many samples, over all ranks, started more than a millisecond after the agreed instant."""
        late = torch.tensor([self._late])
        dist.all_reduce(late, group=self._group)
        return int(late.item())


def three_digits(value: float) -> str:
    """Return a number with three significant digits, as a person writes it: 0.0123, 1.10, 2317."""
    return f"{value:.0f}" if value >= 100 else f"{value:#.3g}".rstrip(".")


def summary(milliseconds: list[float]) -> dict[str, float]:
    """Return the median, the minimum and the maximum of a series."""
    return {"median": statistics.median(milliseconds), "min": min(milliseconds), "max": max(milliseconds)}
