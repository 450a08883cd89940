"""How long tests take, as recorded in tests/durations.json, and the shards that this makes of a part of the tests."""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import native_build

FILE = native_build.ROOT / "tests" / "durations.json"
SHARD_SECONDS = 250.0
"""A shard is at most about this long, so that many cores have something to do; one file may take longer."""
START = "start"
"""Key of what every shard of a part does again: starting Python, importing torch, collecting tests."""

Recorded = Mapping[str, Mapping[str, float]]
"""Seconds by part, and there by file or, for parts that are not pytest's, by the part's own name."""


@dataclass(frozen=True)
class Shard:
    """Test files that one pytest runs."""

    files: tuple[str, ...]
    seconds: float


def read(path: Path = FILE) -> Recorded:
    """Return what is recorded; nothing if there is no such file."""
    recorded: Recorded = json.loads(path.read_text()) if path.exists() else {}
    return recorded


def write(measured: Mapping[str, Mapping[str, float]], path: Path = FILE) -> None:
    """Replace the parts that were measured; the others stay."""
    recorded = {**read(path), **measured}
    rounded = {
        part: {name: round(seconds, 1) for name, seconds in sorted(files.items())}
        for part, files in sorted(recorded.items())
    }
    path.write_text(json.dumps(rounded, indent=1) + "\n")


def cut(files: Iterable[str], recorded: Mapping[str, float], longest: float = SHARD_SECONDS) -> list[Shard]:
    """Cut the sorted list of test files into shards of about the same length.

    Files of one folder stay together, because they build the same stand-ins and fork the same processes.

    Parameters
    ----------
    files
        The test files.
    recorded
        Seconds by file. A file that is not recorded counts as long as the median of the others.
    longest
        Seconds that a shard should not exceed, except by up to half of its first and last file.
    """
    known = {file: seconds for file, seconds in recorded.items() if file != START}
    median = statistics.median(known.values()) if known else 1.0
    start = recorded.get(START, 0.0)
    taken = {file: known.get(file, median) for file in sorted(files)}
    total = sum(taken.values())
    count = max(1, math.ceil(total / longest))
    each = total / count or 1.0
    shards, before = defaultdict[int, list[str]](list), 0.0
    for file, seconds in taken.items():
        middle = int((before + seconds / 2) / each)
        shards[min(middle, count - 1)].append(file)
        before += seconds
    return [Shard(tuple(members), start + sum(taken[file] for file in members)) for members in shards.values()]
