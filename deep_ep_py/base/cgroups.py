"""The memory and CPU time that this process may use: the machine's, and the limits of cgroups in both versions."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from deep_ep_py.base.machine_files import Files

_ROOT = "/sys/fs/cgroup"
_NO_LIMIT = 1 << 60
"""Without a limit, version 1 reports a number larger than any memory."""


@dataclass(frozen=True)
class MemoryLimit:
    """The memory that a process may use.

    Attributes
    ----------
    bytes : int
        The limit.
    of_cgroup : bool
        Whether the process's cgroup sets the limit, as in a container; otherwise it is the memory of the machine.
    """

    bytes: int
    of_cgroup: bool


def memory_limit(files: Files) -> MemoryLimit | None:
    """Return the smaller of the machine's memory and the limit of the process's cgroup; None if both are unknown."""
    limits = []
    total = re.search(r"^MemTotal:\s+(\d+) kB", files.text("/proc/meminfo") or "", re.MULTILINE)
    if total:
        limits.append(MemoryLimit(int(total[1]) << 10, of_cgroup=False))
    given = memory_bytes(files) if files.live else None
    if given is not None:
        limits.append(MemoryLimit(given, of_cgroup=True))
    return min(limits, key=lambda limit: limit.bytes, default=None)


def free_memory(files: Files) -> int | None:
    """Return the memory that can still be written before a process is killed for it; None if it is unknown.

    Files' contents that the machine or a cgroup may drop count as free.
    """
    free = []
    available = re.search(r"^MemAvailable:\s+(\d+) kB", files.text("/proc/meminfo") or "", re.MULTILINE)
    if available:
        free.append(int(available[1]) << 10)
    for folder, version in _folders(files, "memory") if files.live else ():
        names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        limit, used = (files.number(f"{folder}/{name}") for name in names)
        stat = files.text(f"{folder}/memory.stat") or ""
        droppable = re.search(rf"^{'total_' if version == 1 else ''}inactive_file (\d+)$", stat, re.MULTILINE)
        if limit is not None and limit < _NO_LIMIT and used is not None:
            free.append(max(0, limit - used + (int(droppable[1]) if droppable else 0)))
    return min(free, default=None)


def memory_bytes(files: Files) -> int | None:
    """Return the lowest memory limit of the process's cgroup and its ancestors; None if there is none."""
    limits = []
    for folder, version in _folders(files, "memory"):
        limit = files.text(f"{folder}/{'memory.max' if version == 2 else 'memory.limit_in_bytes'}")
        if limit is not None and limit.isdecimal() and int(limit) < _NO_LIMIT:
            limits.append(int(limit))
    return min(limits, default=None)


def cpu_quota(files: Files) -> float | None:
    """Return the CPU time limit of the process's cgroups, as a number of CPUs; None if there is none."""
    quotas = []
    for folder, version in _folders(files, "cpu"):
        if version == 2:
            words = (files.text(f"{folder}/cpu.max") or "").split()
        else:  # a quota of -1 means no limit
            words = [files.text(f"{folder}/cpu.cfs_{which}_us") or "" for which in ("quota", "period")]
        if len(words) == 2 and all(word.isdecimal() for word in words) and int(words[1]):
            quotas.append(int(words[0]) / int(words[1]))
    return min(quotas, default=None)


def _folders(files: Files, controller: str) -> Iterator[tuple[str, int]]:
    """Yield the folders that may limit the process, from the root down, and the version of their interface.

    Inside a container, the root may be the process's own cgroup while the path is that of the host; then only the first
    folder exists.
    """
    for line in (files.text("/proc/self/cgroup") or "").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers == "":
            root, version = _ROOT, 2
        elif controller in controllers.split(","):
            root, version = f"{_ROOT}/{controller}", 1
        else:
            continue
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts) + 1):
            yield "/".join([root, *parts[:depth]]), version
