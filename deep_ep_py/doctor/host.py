"""The processors and the memory of a machine, and what this process has of them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass

from deep_ep_py.core.cpus import cpus_of
from deep_ep_py.doctor.cgroups import cpu_quota, memory_bytes
from deep_ep_py.doctor.files import Files
from deep_ep_py.doctor.findings import Finding, Section, Verdict, count

_ENOUGH_SHM = 1 << 30
_ENOUGH_CPUS = 2


@dataclass(frozen=True)
class MemoryLimit:
    """What a process may use of the memory.

    Attributes
    ----------
    bytes : int
        At most.
    of_cgroup : bool
        Whether the process's cgroup sets it, as a container's does; else the machine has no more.
    """

    bytes: int
    of_cgroup: bool


def size_text(size: int) -> str:
    """Return a number of bytes as people write it."""
    for unit, name in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size / unit:.1f} {name}"
    return f"{size} bytes"


def host(files: Files) -> Section:
    """Describe processors and memory."""
    return Section.of("Host", _host(files))


def memory_limit(files: Files) -> MemoryLimit | None:
    """Return the smaller of what the machine has and what the process's cgroup gives it; None where neither is told."""
    limits = []
    total = re.search(r"^MemTotal:\s+(\d+) kB", files.text("/proc/meminfo") or "", re.MULTILINE)
    if total:
        limits.append(MemoryLimit(int(total[1]) << 10, of_cgroup=False))
    given = memory_bytes(files) if files.live else None
    if given is not None:
        limits.append(MemoryLimit(given, of_cgroup=True))
    return min(limits, key=lambda limit: limit.bytes, default=None)


def kernel_version(files: Files) -> tuple[int, int] | None:
    """Return Linux's version, as (6, 8); None where it is not told."""
    found = re.match(r"(\d+)\.(\d+)", files.text("/proc/sys/kernel/osrelease") or "")
    return (int(found[1]), int(found[2])) if found else None


def _host(files: Files) -> Iterator[Finding]:
    kernel = files.text("/proc/sys/kernel/osrelease")
    if kernel:
        yield Finding("kernel", Verdict.INFO, kernel)
    yield _cpus(files)
    yield _memory(files)
    yield _shared_memory(files)
    yield _huge_pages(files)


def _list_of_cpus(text: str | None) -> set[int]:
    try:
        return set(cpus_of(text or ""))
    except ValueError:
        return set()


def _cpus(files: Files) -> Finding:
    online = _list_of_cpus(files.text("/sys/devices/system/cpu/online"))
    nodes = [name for name in files.names("/sys/devices/system/node") if re.fullmatch(r"node\d+", name)]
    numa = count(max(1, len(nodes)), "NUMA node")
    if not files.live:
        return Finding("CPUs", Verdict.INFO, f"{len(online)} online, {numa}" if online else "unknown")
    listed = re.search(r"^Cpus_allowed_list:\s*(\S+)", files.text("/proc/self/status") or "", re.MULTILINE)
    allowed = _list_of_cpus(listed[1] if listed else None)
    # The list of those that a process may use has CPUs that are offline, or not plugged in, too.
    usable = len(allowed & online) if allowed and online else len(allowed or online)
    if not usable:
        return Finding("CPUs", Verdict.INFO, "unknown")
    quota = cpu_quota(files)
    limited = f", the time of {quota:.3g} by its cgroup" if quota is not None and quota < usable else ""
    value = f"{usable} of {len(online) or usable} for this process{limited}, {numa}"
    if min(usable, usable if quota is None else quota) < _ENOUGH_CPUS:
        reason = "the thread that drives the network takes turns with the program's own"
        return Finding("CPUs", Verdict.WARNING, value, reason, "give the job more CPUs, as by docker run --cpus")
    return Finding("CPUs", Verdict.INFO, value)


def _memory(files: Files) -> Finding:
    limit = memory_limit(files)
    if limit is None:
        return Finding("memory", Verdict.INFO, "unknown")
    of = "the limit of this process's cgroup" if limit.of_cgroup else "all of the machine's memory"
    return Finding("memory", Verdict.INFO, f"{size_text(limit.bytes)}, {of}")


def _shared_memory(files: Files) -> Finding:
    name = "/dev/shm"
    why = "heaps do not lie there; libfabric's provider shm and torch's data loaders need it"
    note = "if this is a container, start it by docker run --shm-size=8g, or with --ipc=host"
    try:
        place = files.path(name)
        found = None if place is None else os.statvfs(place)
    except OSError:
        found = None
    if found is None:
        return Finding(name, Verdict.WARNING, "not there", why, note)
    if not files.live:  # a copy lies on some other file system
        return Finding(name, Verdict.INFO, "there, of unknown size", why)
    size, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    value = f"{size_text(size)}, {size_text(free)} free"
    if free < _ENOUGH_SHM:
        return Finding(name, Verdict.WARNING, value, why, note)
    return Finding(name, Verdict.GOOD, value)


def _huge_pages(files: Files) -> Finding:
    name, folder = "huge pages", "/sys/kernel/mm/hugepages"
    pools = []
    for pool in files.names(folder):
        total, free = (files.number(f"{folder}/{pool}/{which}_hugepages") or 0 for which in ("nr", "free"))
        if total:
            pools.append(f"{free} of {total} of {pool.removeprefix('hugepages-')} free")
    transparent = re.search(r"\[(\w+)\]", files.text("/sys/kernel/mm/transparent_hugepage/shmem_enabled") or "")
    shared = f"transparent huge pages of shared memory: {transparent[1] if transparent else 'unknown'}"
    return Finding(name, Verdict.INFO, "; ".join([*(pools or ["none reserved"]), shared]))
