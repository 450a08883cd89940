"""How long tests take, as recorded in tests/durations.json, and the shards that this makes of a part of the tests."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import native_build

FILE = native_build.ROOT / "tests" / "durations.json"
SHARD_SECONDS = 200.0
"""A shard is about this long, and longer only if one file is: so that many cores have something to do."""
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
    """Distribute test files over as few shards as hold them.

    Parameters
    ----------
    files
        The test files.
    recorded
        Seconds by file. A file that is not recorded counts as long as the median of the others.
    longest
        Seconds that a shard should not exceed; it does if one of its files does.
    """
    known = {file: seconds for file, seconds in recorded.items() if file != START}
    median = statistics.median(known.values()) if known else 1.0
    start = recorded.get(START, 0.0)
    shards: list[tuple[list[str], float]] = []
    for seconds, file in sorted(((known.get(file, median), file) for file in files), reverse=True):
        fitting = [number for number, (_, taken) in enumerate(shards) if taken + seconds <= longest]
        if fitting:
            fullest = max(fitting, key=lambda number: shards[number][1])
            shards[fullest] = ([*shards[fullest][0], file], shards[fullest][1] + seconds)
        else:
            shards.append(([file], start + seconds))
    return [Shard(tuple(sorted(members)), seconds) for members, seconds in shards]
