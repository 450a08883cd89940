"""The GPU's time of each kernel of a call, apart from the rest of the call."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from deep_ep_py.tools.bench.timing import summary
from deep_ep_py.transport.bootstrap.groups import Bootstrap

if TYPE_CHECKING:
    from deep_ep_py import Buffer

T = TypeVar("T")

MOST_ITERATIONS = 10

NOTE = (
    "Each kernel alone, by an event right before and one right after its launch, on the stream of the kernels. These "
    "events cost time themselves, so these are further iterations, from which no other figure comes. Outside are the "
    "host's work and the stream's waits for the caller's stream; inside are the start of the launch, one of the two "
    "events, and above all the kernel's own waits for the kernels of other ranks, which come later. ms is the slowest "
    "rank's time in each iteration. fastest_rank_ms is the median of the fastest rank's: it has waited least. The "
    "times of several launches of a kernel in a call are added. over_copy: ms over the time in which the large copy of "
    "the same run would move the bytes of the kernel's call."
)


class KernelTimes:
    """Takes the times of kernels, call by call.

    Parameters
    ----------
    buffer
        The Buffer that is called.
    ranks
        All ranks.
    """

    def __init__(self, buffer: Buffer, ranks: Bootstrap) -> None:
        self._device, self._ranks = buffer._engine.device, ranks
        self._samples: dict[str, list[dict[str, float]]] = defaultdict(list)

    def observe(self, call: Callable[[], T]) -> Callable[[], T]:
        """Return a function that makes the call while the times of its kernels are taken."""

        def observed() -> T:
            self._device.time_launches(True)
            try:
                return call()
            finally:
                self._device.time_launches(False)

        return observed

    def keep(self, name: str) -> None:
        """Keep the times since the last call, as a sample of the call of this name."""
        times: dict[str, float] = defaultdict(float)
        for kernel, begin, end in self._device.take_launch_times():
            times[kernel] += end - begin
        self._samples[name].append(dict(times))

    def series(self) -> dict[str, dict[str, dict[str, Any]]]:
        """Gather the samples of all ranks.

        Returns
        -------
        dict
            For each call and kernel, `ms` and `fastest_rank_ms`; the same on every rank.
        """
        everyones = self._ranks.all_gather(dict(self._samples))
        found: dict[str, dict[str, dict[str, Any]]] = {}
        for name, samples in self._samples.items():
            found[name] = {}
            for kernel in dict.fromkeys(kernel for sample in samples for kernel in sample):
                by_iteration = [
                    [sample.get(kernel, 0.0) for sample in of_ranks]
                    for of_ranks in zip(*(one[name] for one in everyones))
                ]
                fastest = statistics.median(min(times) for times in by_iteration)
                found[name][kernel] = {
                    "ms": summary([max(times) for times in by_iteration]),
                    "fastest_rank_ms": fastest,
                }
        return found
