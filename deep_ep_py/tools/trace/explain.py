"""What the operations of a timeline waited for."""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

Entry = dict[str, Any]
Interval = tuple[float, float]


@dataclass(frozen=True)
class Explained:
    """An operation of one rank, and the waits that explain its duration.

    Parameters
    ----------
    rank, operation : int
        The rank, and the number of the operation on it.
    name : str
        "dispatch", for example.
    begin, duration : float
        In microseconds.
    waits : dict
        Microseconds by (phase, peer), longest first; they do not overlap, so their sum is at most the duration.
    host : float
        Microseconds in which none of its kernels ran: the host prepared them, or waited for a core.
    """

    rank: int
    operation: int
    name: str
    begin: float
    duration: float
    waits: dict[tuple[str, int], float]
    host: float

    @property
    def host_share(self) -> float:
        """The host's share of the duration, from 0 to 1."""
        return self.host / self.duration if self.duration else 0.0

    @property
    def waited(self) -> float:
        """The sum of the waits, in microseconds."""
        return sum(self.waits.values())

    @property
    def share(self) -> float:
        """The waits' share of the duration, from 0 to 1."""
        return self.waited / self.duration if self.duration else 0.0


def explain(timeline: dict[str, Any]) -> list[Explained]:
    """Explain each operation of a timeline by what its kernels waited for, on a CPU.

    A kernel's blocks work and wait side by side. An instant counts as waited if a thread waits in the block of the
    kernel that waits longest, whose other threads wait for this one at the next barrier. If several of its threads
    wait, the instant is attributed to the wait that ends last. Kernels belong to the operation during which they ran,
    so the result holds for operations that end before the next begins: not with `async_finish` or receive hooks.

    Parameters
    ----------
    timeline
        Of one rank, or merged.

    Returns
    -------
    list of Explained
        By operation and rank.
    """
    kernels: dict[int, _ByTime] = defaultdict(_ByTime)  # by rank
    waits: dict[tuple[int, int], _ByTime] = defaultdict(_ByTime)  # by rank and stream
    operations = []
    for entry in timeline["traceEvents"]:
        kind = entry.get("cat") if entry["ph"] == "X" else None
        if kind == "operation":
            operations.append(entry)
        elif kind == "kernel":
            kernels[entry["pid"]].entries.append(entry)
        elif kind == "wait":
            waits[entry["pid"], entry["args"]["stream"]].entries.append(entry)
    found = []
    for operation in sorted(operations, key=lambda entry: (entry["args"]["operation"], entry["pid"])):
        rank = operation["pid"]
        total: dict[tuple[str, int], float] = defaultdict(float)
        its_kernels = kernels[rank].inside(_interval(operation))
        for kernel in its_kernels:
            own = waits[rank, kernel["args"]["stream"]].inside(_interval(kernel))
            for key, spent in _longest_block(own).items():
                total[key] += spent
        ordered = dict(sorted(total.items(), key=lambda item: -item[1]))
        number = operation["args"]["operation"]
        host = operation["dur"] - _covered(_interval(operation), map(_interval, its_kernels))
        found.append(Explained(rank, number, operation["name"], operation["ts"], operation["dur"], ordered, host))
    return found


def _covered(outer: Interval, inner: Iterable[Interval]) -> float:
    """Return how much of an interval others cover together."""
    covered, until = 0.0, outer[0]
    for begin, end in sorted(inner):
        begin, end = max(begin, until), min(end, outer[1])
        if end > begin:
            covered, until = covered + end - begin, end
    return covered


def _interval(entry: Entry) -> Interval:
    return entry["ts"], entry["ts"] + entry["dur"]


def _middle(entry: Entry) -> float:
    middle: float = entry["ts"] + entry["dur"] / 2
    return middle


class _ByTime:
    """Entries that can be found by their time, once all are there."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []

    @cached_property
    def _middles(self) -> list[float]:
        self.entries.sort(key=_middle)
        return [_middle(entry) for entry in self.entries]

    def inside(self, outer: Interval) -> list[Entry]:
        """Return the entries whose middle is inside; an operation that runs on has kernels that end after it."""
        return self.entries[bisect.bisect_left(self._middles, outer[0]) : bisect.bisect_right(self._middles, outer[1])]


def _longest_block(waits: Sequence[Entry]) -> dict[tuple[str, int], float]:
    """Return the waits of the block that waits longest, by phase and peer."""
    blocks: dict[tuple[int, int], list[Entry]] = defaultdict(list)
    for wait in waits:
        blocks[wait["args"]["stream"], wait["args"]["block"]].append(wait)
    return max((_attributed(block) for block in blocks.values()), key=lambda spent: sum(spent.values()), default={})


def _attributed(waits: Sequence[Entry]) -> dict[tuple[str, int], float]:
    """Attribute each instant at which a thread waits to the wait that ends last."""
    spent: dict[tuple[str, int], float] = defaultdict(float)
    covered_from = float("inf")
    # From the last end backwards: what a wait covers beyond those that end later is its own.
    for wait in sorted(waits, key=lambda wait: -_interval(wait)[1]):
        begin, end = _interval(wait)
        own = min(end, covered_from) - begin
        if own > 0:
            spent[wait["args"]["phase"], wait["args"]["peer"]] += own
            covered_from = begin
    return spent
