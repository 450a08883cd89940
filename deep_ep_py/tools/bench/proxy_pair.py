"""The cost of the proxy against bare calls of its provider: puts between two processes, each a rank of `launch`."""

from __future__ import annotations

import ctypes
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from deep_ep_py.base.native import C
from deep_ep_py.tools.bench.rank_job import RankContext
from deep_ep_py.transport.bootstrap.groups import make_bootstrap
from deep_ep_py.transport.bootstrap.start import connect, exchange_heaps

SMALL = 16
LARGE = 1 << 20
WINDOW = 16
"""Puts of `LARGE` bytes in flight at a time: as many bytes as the proxy allows in flight to a rank."""
SMALL_WINDOW = 32
"""Puts of `SMALL` bytes in flight at a time: as many as the proxy allows in flight to a word."""
_LARGE_PUTS = 64
_SMALL_PUTS = 10000
_ROUND_TRIPS = 1000
_UNTIL_ASLEEP = 1.5  # seconds; the proxy's thread polls for slightly more than one
_AWAKE_PUTS = 20
_WARMUP = 2


@dataclass(frozen=True)
class PairOptions:
    """Options of the measurement.

    Parameters
    ----------
    provider
        The libfabric provider; empty for the best available.
    iterations
        Samples of every measure, alternating between the proxy and bare calls.
    asleep
        Number of first puts of each kind after a rest; 0 for none.
    """

    provider: str
    iterations: int
    asleep: int


class Lane:
    """A connection from this rank to the other one and back."""

    def __init__(self, context: RankContext, kind: Any, provider: str) -> None:
        self.sends = context.rank == 0
        heap = C.Heap.make_shared(C.proxy.HEAP_BYTES)
        ranks = connect(make_bootstrap(context.group))
        self._heaps = exchange_heaps(
            ranks,
            heap,
            lambda descriptor, size, mapped: C.Heap.map(descriptor, size),
            lambda: C.Heap.make_plain(heap.bytes),
        )
        self._puts = C.proxy.Puts(kind=kind, rank=context.rank, heaps=self._heaps, provider=provider)
        self.name: str = self._puts.name
        if self.sends:
            sources = random.Random(0).randbytes(C.proxy.MEASURED_BYTES)
            ctypes.memmove(heap.base + C.proxy.SOURCES, sources, len(sources))
        ranks.all_gather(None)

    def stream(self, size: int, count: int, window: int) -> float:
        """Return the seconds that rank 0 takes to send `count` puts; on rank 1 the result is meaningless."""
        with self._together():
            if self.sends:
                begin, end = self._puts.send(size, count, window)
                return end - begin
            self._puts.receive(count)
            return 0.0

    def round_trip(self) -> float:
        """Return the seconds of a round trip."""
        with self._together():
            begin, end = self._puts.round_trips(SMALL, _ROUND_TRIPS, self.sends)
            return (end - begin) / _ROUND_TRIPS

    def one_way(self, size: int, after: float) -> float:
        """Return when the put left, on rank 0, or when it arrived, on rank 1, by their common clock."""
        with self._together():
            time.sleep(after)
            self._puts.meet()
            return self._puts.send(size, 1, 1)[0] if self.sends else self._puts.receive(1)

    def is_right(self) -> bool:
        """Return whether rank 1 has everything that rank 0 sent, including large puts to all places."""
        sources, targets = (
            ctypes.string_at(heap.base + offset, C.proxy.MEASURED_BYTES)
            for heap, offset in zip(self._heaps, (C.proxy.SOURCES, C.proxy.TARGETS), strict=True)
        )
        return sources == targets

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Keep both ranks stepping until both have ended: a provider answers only when it is polled."""
        self._puts.meet()
        yield
        self._puts.meet()


def run(context: RankContext, options: PairOptions) -> dict[str, Any]:
    """Time puts from rank 0 to rank 1.

    Parameters
    ----------
    context
        The context of one of two ranks.
    options
        Options of the measurement.

    Returns
    -------
    dict
        `provider`; `samples`, a list for each measure and lane: `large_puts` in bytes per second, `round_trip` in
        seconds, `small_puts` per second; `first_puts`, in seconds: see `_first_puts`; `verified`: everything sent has
        arrived.
    """
    lanes = {
        "raw": Lane(context, C.proxy.Kind.RAW, options.provider),
        "proxy": Lane(context, C.proxy.Kind.STEPPED, options.provider),
    }
    samples: dict[str, dict[str, list[float]]] = {}
    for iteration in range(-_WARMUP, options.iterations):
        for what, measure in _MEASURES.items():
            # Each lane goes first in turn, because other load on the machine changes slowly.
            for name in sorted(lanes, reverse=iteration % 2 == 0):
                figure = measure(lanes[name])
                if iteration >= 0:
                    samples.setdefault(what, {}).setdefault(name, []).append(figure)
        context.emit({"doing": f"iteration {iteration + 1} of {options.iterations}"})
    provider, verified = lanes["raw"].name, all(lane.is_right() for lane in lanes.values())
    del lanes
    return {"provider": provider, "samples": samples, "first_puts": _first_puts(context, options), "verified": verified}


def _large_puts(lane: Lane) -> float:
    seconds = lane.stream(LARGE, _LARGE_PUTS, WINDOW)
    return LARGE * _LARGE_PUTS / seconds if lane.sends else 0.0


def _small_puts(lane: Lane) -> float:
    seconds = lane.stream(SMALL, _SMALL_PUTS, SMALL_WINDOW)
    return _SMALL_PUTS / seconds if lane.sends else 0.0


_MEASURES = {"large_puts": _large_puts, "round_trip": Lane.round_trip, "small_puts": _small_puts}


def _first_puts(context: RankContext, options: PairOptions) -> dict[str, list[float]]:
    """Return the seconds from a command until its put has arrived; one side's proxy is a thread, the other is stepped.

    The thread is the sender's for a `command` and the receiver's for an `arrival`; it is awake, or asleep after a rest.
    """
    if options.asleep == 0:
        return {}
    ranks = make_bootstrap(context.group)
    found: dict[str, list[float]] = {}
    for what, sleeper in (("command", 0), ("arrival", 1)):
        kind = C.proxy.Kind.THREADED if context.rank == sleeper else C.proxy.Kind.STEPPED
        lane = Lane(context, kind, options.provider)
        for size in (SMALL, LARGE):
            for state, times in (("awake", _AWAKE_PUTS), ("asleep", options.asleep)):
                context.emit({"doing": f"first puts: {what}, {size} bytes, {state}"})
                moments = []
                for _ in range(_WARMUP + times if state == "awake" else times):
                    # At a random moment of the thread's sleep.
                    rest = 0.0 if state == "awake" else _UNTIL_ASLEEP + random.random() * 0.01
                    moments.append(lane.one_way(size, rest))
                left, arrived = ranks.all_gather(moments)
                taken = [end - begin for begin, end in zip(left, arrived, strict=True)]
                found[f"{what}, {size} bytes, {state}"] = taken[-times:]
    return found
