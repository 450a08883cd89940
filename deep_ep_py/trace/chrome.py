"""Timelines in Chrome's trace event format, which https://ui.perfetto.dev and chrome://tracing open.

The format: "Trace Event Format" by Google, JSON object form. Times are in microseconds, by the clock of kernels. A
process is a rank; a thread is the host, a stream of kernels, a thread of a kernel that has waited, or a queue pair.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from deep_ep_py._version import __version__
from deep_ep_py.bootstrap.machines import machine_name
from deep_ep_py.core.logs import Span
from deep_ep_py.core.native import C

Entry = dict[str, Any]

_HOST, _KERNELS, _WAITS, _QUEUES = 0, 1_000, 10_000, 1_000_000
_WITHIN = 1e-3  # microseconds: an arrow must begin and end inside of the slices that it joins


def write_rank(
    path: Path, words: Any, ranks: int, spans: Sequence[Span], events: Iterable[C.timeline.Event], lost: int
) -> None:
    """Write a rank's timeline.

    Parameters
    ----------
    path
        The file.
    words : recording.Words
        Names words in the memory of ranks.
    ranks
        Number of ranks.
    spans
        The operations of the host.
    events
        What was recorded for this rank.
    lost
        How many events were not kept, of all ranks of the process.
    """
    tracks = _Tracks(words.rank)
    for span in spans:
        args = {"operation": span.operation} | ({"moved": span.moved.strip(", ")} if span.moved else {})
        tracks.slice(_HOST, "host", span.kind, span.begin, span.end, args, "operation")
    for event in sorted(events, key=lambda event: (event.begin, -event.end)):
        _add(tracks, words, event)
    metadata = {
        "deep_ep_py": __version__,
        "rank": words.rank,
        "ranks": ranks,
        "host": socket.gethostname(),
        "machine": platform.machine(),
        "pid": os.getpid(),
        "same_clock": machine_name(),
        # Aligns machines, as far as their clocks agree.
        "wall_minus_clock_ns": time.time_ns() - C.executor.now_ns(),
        "events_lost": lost,
    }
    path.write_text(json.dumps({"traceEvents": tracks.entries, "displayTimeUnit": "ns", "metadata": metadata}) + "\n")


def _add(tracks: _Tracks, words: Any, event: C.timeline.Event) -> None:
    kind = C.timeline.Kind
    if event.kind == kind.KERNEL:
        track = tracks.number(_KERNELS, event.stream)
        tracks.slice(track, "kernels", event.name, event.begin, event.end, {"blocks": event.value}, "kernel")
    elif event.kind == kind.HOST_WAIT:
        tracks.slice(_HOST, "host", f"wait: {event.name}", event.begin, event.end, {}, "host wait")
    elif event.kind == kind.WAIT:
        track = tracks.number(_WAITS, (event.stream, event.block, event.thread))
        args = {"phase": event.name, "peer": event.peer, "expected": event.value, "stream": event.stream}
        args |= {"block": event.block, "thread": event.thread}
        name = event.name if event.peer < 0 else f"{event.name} of rank {event.peer}"
        title = f"block {event.block}, thread {event.thread}"
        tracks.slice(track, title, name, event.begin, event.end, args, "wait")
        if (word := words.name(words.rank, event.word)) is not None:
            tracks.arrow("f", track, event.end, f"{word}:{event.value}", event.begin)
    else:
        track = tracks.number(_QUEUES, event.stream)
        arrival = event.peer == words.rank
        title = f"arrivals from rank {event.stream}" if arrival else f"queue pair to rank {event.peer}"
        args = {"bytes": event.value} if event.kind == kind.PUT else {"value": event.value}
        name = event.name if arrival else f"{event.name} to rank {event.peer}"
        track = tracks.slice(track, title, name, event.begin, event.end, args | {"peer": event.peer}, event.name)
        if event.kind == kind.SIGNAL and (word := words.name(event.peer, event.word)) is not None:
            tracks.arrow("s", track, event.begin, f"{word}:{event.value}", event.begin)


class _Tracks:
    """The entries of one rank, and its tracks: slices of a track nest, so what overlaps gets another track."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.entries: list[Entry] = [
            {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}},
            {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}},
        ]
        self._numbers: dict[tuple[int, Any], int] = {}
        self._open: dict[int, list[int]] = {}  # of each track: the ends of the slices that may still enclose others
        self._lanes: dict[int, list[int]] = {}

    def number(self, base: int, key: Any) -> int:
        """Return the number of a track; tracks of one kind are numbered in the order in which they appear."""
        known = sum(1 for kind, _ in self._numbers if kind == base)
        return base + 10 * self._numbers.setdefault((base, key), known)

    def slice(self, track: int, title: str, name: str, begin: int, end: int, args: Entry, category: str) -> int:
        """Add a slice, and return the track that has taken it."""
        lanes = self._lanes.setdefault(track, [])
        for lane in (*lanes, track + len(lanes)):
            stack = self._open.setdefault(lane, [])
            while stack and stack[-1] <= begin:
                stack.pop()
            if not stack or end <= stack[-1]:
                break
        stack.append(end)
        if lane not in lanes:
            lanes.append(lane)
            self._name(lane, title)
        self.entries.append(
            {
                "ph": "X",
                "name": name,
                "cat": category,
                "pid": self._rank,
                "tid": lane,
                "ts": begin / 1e3,
                "dur": (end - begin) / 1e3,
                "args": args,
            }
        )
        return lane

    def arrow(self, end: str, track: int, at: int, identity: str, earliest: int) -> None:
        """Add an end of an arrow from a signal ("s") to the wait that it ends ("f")."""
        ts = max(earliest / 1e3, at / 1e3 - _WITHIN) if end == "f" else at / 1e3
        entry = {
            "ph": end,
            "name": "signal",
            "cat": "signal",
            "id": identity,
            "pid": self._rank,
            "tid": track,
            "ts": ts,
        }
        self.entries.append(entry | ({"bp": "e"} if end == "f" else {}))

    def _name(self, track: int, title: str) -> None:
        for name, args in (("thread_name", {"name": title}), ("thread_sort_index", {"sort_index": track})):
            self.entries.append({"ph": "M", "name": name, "pid": self._rank, "tid": track, "args": args})
