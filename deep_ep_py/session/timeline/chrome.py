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
from deep_ep_py.base.logs import Span
from deep_ep_py.base.native import C
from deep_ep_py.session.timeline.stages import Stages
from deep_ep_py.session.timeline.tracks import Entry, Tracks
from deep_ep_py.transport.bootstrap.machines import machine_name

_HOST, _KERNELS, _WAITS, _STAGES, _QUEUES = range(5)


def write_rank(
    path: Path,
    words: Any,
    ranks: int,
    group: str,
    spans: Sequence[Span],
    events: Iterable[C.timeline.Event],
    lost: int,
    stages: Stages | None = None,
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
    group
        The name of the group of ranks, the same on all of them.
    spans
        The operations of the host.
    events
        What was recorded for this rank.
    lost
        How many events were not kept, of all ranks of the process.
    stages
        The stages of the rank's kernels, if they were noted.
    """
    tracks = Tracks(words.rank)
    for span in spans:
        args: Entry = {"operation": span.operation}
        args |= {"moved": span.moved.strip(", ")} if span.moved else {}
        args |= {} if span.ended else {"unfinished": True}
        tracks.track(_HOST, None, "host").add(span.kind, "operation", span.begin, span.end, args)
    for event in sorted(events, key=lambda event: event.begin):
        _add(tracks, words, event)
    if stages is not None:
        _add_stages(tracks, stages)
    metadata = {
        "deep_ep_py": __version__,
        "rank": words.rank,
        "ranks": ranks,
        "group": group,
        "host": socket.gethostname(),
        "machine": platform.machine(),
        "pid": os.getpid(),
        "same_clock": machine_name(),
        # Aligns machines, as far as their clocks agree.
        "wall_minus_clock_ns": time.time_ns() - C.executor.now_ns(),
        "events_lost": lost,
    }
    write(path, tracks.entries(), metadata)


def write(path: Path, entries: Iterable[Entry], metadata: Entry) -> None:
    """Write a timeline, one entry per line: there may be a million. Creates the folder if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        file.write(f'{{"displayTimeUnit": "ns", "metadata": {json.dumps(metadata)},\n"traceEvents": [')
        separator = "\n"
        for entry in entries:
            file.write(f"{separator}{json.dumps(entry)}")
            separator = ",\n"
        file.write("\n]}\n")


def _add(tracks: Tracks, words: Any, event: C.timeline.Event) -> None:
    kind = C.timeline.Kind
    begin, end = event.begin, event.end
    args: Entry
    if event.kind == kind.KERNEL:
        args = {"blocks": event.value, "stream": event.stream}
        tracks.track(_KERNELS, event.stream, "kernels").add(event.name, "kernel", begin, end, args)
    elif event.kind == kind.HOST_WAIT:
        tracks.track(_HOST, None, "host").add(f"wait: {event.name}", "host wait", begin, end, {})
    elif event.kind == kind.WAIT:
        args = {"phase": event.name, "peer": event.peer, "expected": event.value, "stream": event.stream}
        args |= {"block": event.block, "thread": event.thread}
        name = event.name if event.peer < 0 else f"{event.name} of rank {event.peer}"
        word = words.name(words.rank, event.word)
        arrow = None if word is None else ("f", f"{word}:{event.value}")
        key = (event.stream, event.block, event.thread)
        track = tracks.track(_WAITS, key, f"block {event.block}, thread {event.thread}")
        track.add(name, "wait", begin, end, args, arrow)
    else:
        arrival = event.peer == words.rank
        title = f"arrivals from rank {event.stream}" if arrival else f"queue pair to rank {event.peer}"
        args = {"bytes": event.value} if event.kind == kind.PUT else {"value": event.value}
        name = event.name if arrival else f"{event.name} to rank {event.peer}"
        word = words.name(event.peer, event.word) if event.kind == kind.SIGNAL else None
        arrow = None if word is None else ("s", f"{word}:{event.value}")
        track = tracks.track(_QUEUES, event.stream, title)
        track.add(name, event.name, begin, end, args | {"peer": event.peer}, arrow)


def _add_stages(tracks: Tracks, stages: Stages) -> None:
    for number, launch in enumerate(stages.launches):
        if stages.clocks_differ:  # otherwise the kernel has an event of its own
            begin, end = stages.interval(number)
            args: Entry = {"blocks": launch.blocks, "stream": 0}
            tracks.track(_KERNELS, 0, "kernels").add(launch.kernel, "kernel", begin, end, args)
        for block, warp, name, begin, end in stages.of(number):
            args = {"kernel": launch.kernel, "launch": number, "block": block, "warp": warp}
            track = tracks.track(_STAGES, (block, warp), f"block {block}, warp {warp}")
            track.add(name, "stage", begin, end, args)
