"""The network traffic of each operation of a benchmark, as counted by the software NICs or the proxies."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from deep_ep_py import Buffer

T = TypeVar("T")

NOTE = (
    "wire_bytes and messages: the bytes that all ranks' NICs or proxies send in an operation, rows and control "
    "together, and the number of requests; mean over the timed iterations. wire_gb_per_s are these bytes per second of "
    "the median. Loads and stores inside a node are not included. What a call with a hook posts may be counted in the "
    "other half."
)


class WireMeter:
    """Counts the traffic that a rank sends.

    Parameters
    ----------
    buffer
        The Buffer whose NICs count.
    group
        All ranks.
    """

    def __init__(self, buffer: Buffer, group: dist.ProcessGroup) -> None:
        self._buffer, self._group = buffer, group
        self._sent: dict[str, list[int]] = defaultdict(lambda: [0, 0])

    def count(self, name: str, call: Callable[[], T]) -> T:
        """Make a call of an operation, and add what it sends to the operation's total."""
        before = self._totals()
        result = call()
        for place, (now, was) in enumerate(zip(self._totals(), before, strict=True)):
            self._sent[name][place] += now - was
        return result

    def means(self, iterations: int) -> dict[str, dict[str, int]]:
        """Return the bytes and messages of each operation for all ranks together; empty if there are no such NICs.

        Collective.
        """
        if not self._buffer.network_counters():
            return {}
        names = sorted(self._sent)
        sums = torch.tensor([self._sent[name] for name in names], dtype=torch.int64)
        dist.all_reduce(sums, group=self._group)
        rows = (sums / iterations).round().to(torch.int64).tolist()
        return {name: {"bytes": sent, "messages": messages} for name, (sent, messages) in zip(names, rows, strict=True)}

    def _totals(self) -> tuple[int, int]:
        counters = self._buffer.network_counters()
        return sum(peer["bytes"] for peer in counters), sum(peer["writes"] + peer["atomics"] for peer in counters)
