"""How long each stage of a kernel takes, over the launches and ranks of a timeline."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

Entry = dict[str, Any]


@dataclass
class Stage:
    """A stage of a kernel.

    Parameters
    ----------
    kernel, name : str
        The kernel and the stage. A kernel whose halves are launched one by one has an entry for each.
    ends : list of float
        For each launch that has it, when its last warp ended it, in microseconds from the first warp's begin.
    longest : list of float
        For each of these launches, how long the warp took that took longest.
    """

    kernel: str
    name: str
    ends: list[float] = field(default_factory=list)
    longest: list[float] = field(default_factory=list)

    @property
    def end(self) -> float:
        """The median of `ends`."""
        return statistics.median(self.ends)

    @property
    def duration(self) -> float:
        """The median of `longest`."""
        return statistics.median(self.longest)


def stages_of(entries: Iterable[Entry]) -> list[Stage]:
    """Return the stages of the kernels of a timeline, of one rank or merged.

    Parameters
    ----------
    entries
        Its `traceEvents`.

    Returns
    -------
    list of Stage
        By kernel and the stages that its launches have, in the order of first launches, and by the ends of stages.
    """
    launches: dict[tuple[int, int, str], list[Entry]] = defaultdict(list)
    for entry in entries:
        if entry["ph"] == "X" and entry["cat"] == "stage":
            args = entry["args"]
            launches[entry["pid"], args["launch"], args["kernel"]].append(entry)
    found: dict[tuple[str, frozenset[str]], dict[str, Stage]] = {}
    for (_, _, kernel), of_launch in launches.items():
        key = kernel, frozenset(entry["name"] for entry in of_launch)
        begin = min(entry["ts"] for entry in of_launch)
        by_name: dict[str, list[Entry]] = defaultdict(list)
        for entry in of_launch:
            by_name[entry["name"]].append(entry)
        for name, of_stage in by_name.items():
            stage = found.setdefault(key, {}).setdefault(name, Stage(kernel, name))
            stage.ends.append(max(entry["ts"] + entry["dur"] for entry in of_stage) - begin)
            stage.longest.append(max(entry["dur"] for entry in of_stage))
    return [stage for of_kernel in found.values() for stage in sorted(of_kernel.values(), key=lambda stage: stage.end)]
