"""The timelines of several ranks as one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Timeline = dict[str, Any]


def read(path: Path) -> Timeline:
    """Read a timeline that this library wrote.

    Raises
    ------
    ValueError
        The file is none; the message names it.
    """
    try:
        timeline: Timeline = json.loads(path.read_text())
        metadata = timeline["metadata"]
        timeline["traceEvents"], metadata["group"] if "rank" in metadata else metadata["ranks"][0]["group"]
    except (ValueError, LookupError, TypeError):
        raise ValueError(f"{path}: expected a timeline that deep_ep_py has written") from None
    return timeline


def merge(timelines: Sequence[Timeline]) -> Timeline:
    """Join timelines, with arrows from the signals of software NICs to the waits that they end.

    Ranks of one machine have a common clock. Those of other machines are placed by the time of day of their machines,
    which is as exact as these agree. Times begin at the first event.

    Parameters
    ----------
    timelines
        One per rank.

    Returns
    -------
    dict
        In the same format; `metadata` has those of the ranks under `ranks`.

    Raises
    ------
    ValueError
        Two are of the same rank, or they are of different groups.
    """
    if any("rank" not in one["metadata"] for one in timelines):
        raise ValueError(
            "one of the timelines is merged already: expected those of single ranks, or a merged one alone"
        )
    metadata = sorted((one["metadata"] for one in timelines), key=lambda one: one["rank"])
    numbers = [one["rank"] for one in metadata]
    if len(set(numbers)) != len(numbers) or len({(one["ranks"], one["group"]) for one in metadata}) > 1:
        raise ValueError(f"the timelines are of ranks {numbers}: expected different ranks of one group")
    reference = metadata[0]
    entries: list[dict[str, Any]] = []
    for timeline in timelines:
        own = timeline["metadata"]
        apart = own["same_clock"] != reference["same_clock"]
        shift = (own["wall_minus_clock_ns"] - reference["wall_minus_clock_ns"]) / 1e3 if apart else 0.0
        entries += [entry | ({"ts": entry["ts"] + shift} if "ts" in entry else {}) for entry in timeline["traceEvents"]]
    first = min((entry["ts"] for entry in entries if "ts" in entry), default=0.0)
    for entry in entries:
        if "ts" in entry:
            entry["ts"] -= first
    return {"traceEvents": _joined(entries), "displayTimeUnit": "ns", "metadata": {"ranks": metadata}}


def cut(timeline: Timeline, operation: int) -> Timeline:
    """Return the part of a merged timeline from the first begin of an operation to its last end.

    Raises
    ------
    ValueError
        No rank has such an operation.
    """
    entries = timeline["traceEvents"]
    spans = {entry["args"]["operation"]: entry for entry in entries if entry.get("cat") == "operation"}
    if operation not in spans:
        raise ValueError(f"--operation {operation}: expected one of {min(spans, default=0)} to {max(spans, default=0)}")
    chosen = [e for e in entries if e.get("cat") == "operation" and e["args"]["operation"] == operation]
    begin, end = min(e["ts"] for e in chosen), max(e["ts"] + e["dur"] for e in chosen)
    kept = [
        entry | ({"ts": entry["ts"] - begin} if "ts" in entry else {})
        for entry in entries
        if "ts" not in entry or (entry["ts"] >= begin and entry["ts"] + entry.get("dur", 0) <= end)
    ]
    return timeline | {"traceEvents": _joined(kept)}


def _joined(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the entries without the arrows that have one end only."""
    ends: dict[str, set[str]] = {}
    for entry in entries:
        if "id" in entry:
            ends.setdefault(entry["id"], set()).add(entry["ph"])
    return [entry for entry in entries if "id" not in entry or len(ends[entry["id"]]) == 2]
