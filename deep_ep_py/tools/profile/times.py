"""The time that launches should take on a GPU: the longest path through their threads, and what bandwidth allows."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Any

from deep_ep_py.base.native import C
from deep_ep_py.tools.profile.report import name_of

_CYCLES_PER_US = 1900
_SCHEDULERS = 4  # of an SM; each issues one instruction of a warp per cycle
_LANES = 32
_HBM_BYTES_PER_US = 4.2e6
_NVLINK_BYTES_PER_US = 0.45e6  # NVLink 4, in one direction


@dataclass(frozen=True)
class PathLine:
    """The share of a source line in a longest path.

    Parameters
    ----------
    place : str
        The position and where it was inlined, for example "copy.h:52 < rows.h:31".
    us : float
        Microseconds.
    """

    place: str
    us: float


@dataclass(frozen=True)
class KernelTime:
    """The time of a kernel that all ranks have launched.

    Parameters
    ----------
    name : str
        Name of the kernel.
    number : int
        Which of the ranks' launches of this kernel, from 0.
    us : float
        Microseconds from the first rank's start to the last rank's end: the largest of the following three.
    path_us : float
        Those of the longest path.
    bandwidth_us : float
        Those that the bytes of rows take, at 4.2 TB/s per GPU and, between GPUs, 450 GB/s in each direction.
    issue_us : float
        Those in which an SM issues the instructions of a block.
    instructions, waits, fences, barriers : int
        What the longest path consists of: instructions, waits for data from global memory, fences at device or system
        scope, and barriers of a block.
    nic_rate : float
        GB/s that the NICs of the rank that sends most have sent meanwhile.
    lines : tuple of PathLine
        The places of the longest path, those that take most time first.
    """

    name: str
    number: int
    us: float
    path_us: float
    bandwidth_us: float
    issue_us: float
    instructions: int
    waits: int
    fences: int
    barriers: int
    nic_rate: float
    lines: tuple[PathLine, ...]

    @property
    def title(self) -> str:
        """The name, with the number of a launch that is not the first."""
        return f"{self.name} {self.number + 1}" if self.number else self.name

    def as_json(self, lines: int) -> dict[str, Any]:
        """Return the time for a JSON file, with the first `lines` places."""
        return dataclasses.asdict(dataclasses.replace(self, lines=self.lines[:lines]))


def times(counted: dict[str, Any], one_gpu: bool) -> list[KernelTime]:
    """Return the times of kernels, in the order in which they began.

    Parameters
    ----------
    counted
        Counts by symbol, from `C.ptx.counted`.
    one_gpu
        Whether the ranks share a GPU.
    """
    found: list[tuple[float, KernelTime]] = []
    for symbol, (kernel, reports) in counted.items():
        places = {C.ptx.NIC_PLACE: "NIC"} | {report.place_number: report.place for report in reports}
        by_rank: Counter[int] = Counter()
        launches: defaultdict[int, list[Any]] = defaultdict(list)
        for launch in kernel.times:
            launches[by_rank[launch.rank]].append(launch)
            by_rank[launch.rank] += 1
        for number, together in launches.items():
            begin = min(launch.begin for launch in together)
            found.append((begin, _time(name_of(symbol), number, together, places, one_gpu)))
    return [time for _, time in sorted(found, key=lambda one: one[0])]


def _time(name: str, number: int, launches: list[Any], places: dict[int, str], one_gpu: bool) -> KernelTime:
    last = max(launches, key=lambda launch: launch.end)
    path_us = (last.end - min(launch.begin for launch in launches)) / _CYCLES_PER_US
    if one_gpu:
        bandwidth_us = sum(launch.own_bytes + launch.peer_bytes for launch in launches) / _HBM_BYTES_PER_US
    else:
        bandwidth_us = max(
            max(launch.own_bytes / _HBM_BYTES_PER_US, launch.peer_bytes / _NVLINK_BYTES_PER_US) for launch in launches
        )
    issue_us = max(
        launch.thread_instructions / _LANES / launch.blocks / _SCHEDULERS / _CYCLES_PER_US for launch in launches
    )
    us = max(path_us, bandwidth_us, issue_us)
    ordered = sorted(last.cycles_by_place.items(), key=lambda line: -line[1])
    return KernelTime(
        name=name,
        number=number,
        us=us,
        path_us=path_us,
        bandwidth_us=bandwidth_us,
        issue_us=issue_us,
        instructions=last.instructions,
        waits=last.waits,
        fences=last.fences,
        barriers=last.barriers,
        nic_rate=max(launch.nic_bytes for launch in launches) / us / 1e3,
        lines=tuple(PathLine(places.get(place, "?"), cycles / _CYCLES_PER_US) for place, cycles in ordered),
    )
