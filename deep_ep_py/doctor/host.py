"""The processors, the memory and the limits that a process has here."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass

from deep_ep_py.core.cpus import cpus_of
from deep_ep_py.doctor.files import Files
from deep_ep_py.doctor.findings import Finding, Section, Verdict

_GIB = 1 << 30
_ENOUGH_FILES = 4096
"""A rank holds a socket and a few descriptors for each other rank of its machine, and a socket for each of others."""
_ENOUGH_SHM = _GIB


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


def _size_text(count: int) -> str:
    """Return a number of bytes as people write it."""
    for unit, name in ((1 << 40, "TiB"), (_GIB, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count} bytes"


def host(files: Files) -> Section:
    """Describe processors, memory and limits."""
    return Section.of("Host", _host(files))


def memory_limit(files: Files) -> MemoryLimit | None:
    """Return the smaller of what the machine has and what the process's cgroup gives it; None where neither is told."""
    limits = []
    total = re.search(r"^MemTotal:\s+(\d+) kB", files.text("/proc/meminfo") or "", re.MULTILINE)
    if total:
        limits.append(MemoryLimit(int(total[1]) << 10, of_cgroup=False))
    given = _cgroup_memory(files)
    if given is not None:
        limits.append(MemoryLimit(given, of_cgroup=True))
    return min(limits, key=lambda limit: limit.bytes, default=None)


def _host(files: Files) -> Iterator[Finding]:
    kernel = files.text("/proc/sys/kernel/osrelease")
    if kernel:
        yield Finding("kernel", Verdict.INFO, kernel)
    yield _cpus(files)
    yield _memory(files)
    yield _shared_memory(files)
    yield from _limits(files)
    yield _huge_pages(files)


def _cpus(files: Files) -> Finding:
    allowed = re.search(r"^Cpus_allowed_list:\s*(\S+)", files.text("/proc/self/status") or "", re.MULTILINE)
    online = files.text("/sys/devices/system/cpu/online")
    nodes = [name for name in files.names("/sys/devices/system/node") if re.fullmatch(r"node\d+", name)]
    text = allowed[1] if allowed else online
    try:
        count = len(cpus_of(text or ""))
    except ValueError:
        return Finding("CPUs", Verdict.INFO, "unknown")
    value = f"{count} for this process, NUMA nodes: {max(1, len(nodes))}"
    if count < 2:
        return Finding("CPUs", Verdict.WARNING, value, "the proxy's thread takes turns with the program's")
    return Finding("CPUs", Verdict.INFO, value)


def _cgroup_memory(files: Files) -> int | None:
    """The limits of the process's cgroup and of all above it, in either version of Linux's interface."""
    limits = []
    for line in (files.text("/proc/self/cgroup") or "").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers == "":
            folder, name = "/sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            folder, name = "/sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts) + 1):
            limit = files.text("/".join([folder, *parts[:depth], name]))
            if limit is not None and limit.isdecimal() and int(limit) < 1 << 60:  # beyond: no limit
                limits.append(int(limit))
    return min(limits, default=None)


def _memory(files: Files) -> Finding:
    limit = memory_limit(files)
    if limit is None:
        return Finding("memory", Verdict.INFO, "unknown")
    of = "the limit of this process's cgroup" if limit.of_cgroup else "all of the machine's memory"
    return Finding("memory", Verdict.INFO, f"{_size_text(limit.bytes)}, {of}")


def _shared_memory(files: Files) -> Finding:
    name = "/dev/shm"
    why = "heaps do not lie there; libfabric's provider shm and torch's data loaders need it"
    try:
        found = os.statvfs(files.path(name))
    except OSError:
        return Finding(name, Verdict.WARNING, "not there", why, "docker run --shm-size=8g ...")
    if not files.live:  # a copy lies on some other file system
        return Finding(name, Verdict.INFO, "there, of unknown size", why)
    size, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    value = f"{_size_text(size)}, {_size_text(free)} free"
    if free < _ENOUGH_SHM:
        return Finding(name, Verdict.WARNING, value, why, "docker run --shm-size=8g ...")
    return Finding(name, Verdict.GOOD, value)


def _limits(files: Files) -> Iterator[Finding]:
    text = files.text("/proc/self/limits") or ""

    def soft(name: str) -> int | None:
        found = re.search(rf"^{name}\s+(\S+)", text, re.MULTILINE)
        if found and found[1] == "unlimited":
            return -1
        return int(found[1]) if found and found[1].isdecimal() else None

    locked = soft("Max locked memory")
    if locked is not None:
        yield _locked_memory(locked, files)
    descriptors = soft("Max open files")
    if descriptors is not None:
        few = 0 <= descriptors < _ENOUGH_FILES
        yield Finding(
            "open files (ulimit -n)",
            Verdict.WARNING if few else Verdict.GOOD,
            "unlimited" if descriptors < 0 else str(descriptors),
            "each rank needs several descriptors for every other rank" if few else "",
            "ulimit -n 65536" if few else "",
        )


def _locked_memory(locked: int, files: Files) -> Finding:
    name = "locked memory (ulimit -l)"
    if locked < 0:
        return Finding(name, Verdict.GOOD, "unlimited")
    value = _size_text(locked)
    limit = memory_limit(files)
    if limit and locked >= limit.bytes:
        return Finding(name, Verdict.GOOD, value)
    if not files.names("/sys/class/infiniband"):
        return Finding(name, Verdict.INFO, value, "RDMA NICs would need more")
    return Finding(
        name,
        Verdict.WARNING,
        value,
        "RDMA registration pins memory: unless the process may lock any (CAP_IPC_LOCK), larger heaps are refused",
        "docker run --ulimit memlock=-1 ...; or '* - memlock unlimited' in /etc/security/limits.conf",
    )


def _huge_pages(files: Files) -> Finding:
    name, folder = "huge pages", "/sys/kernel/mm/hugepages"
    pools = []
    for pool in files.names(folder):
        total, free = (files.number(f"{folder}/{pool}/{which}_hugepages") or 0 for which in ("nr", "free"))
        if total:
            pools.append(f"{free} of {total} of {pool.removeprefix('hugepages-')} free")
    transparent = re.search(r"\[(\w+)\]", files.text("/sys/kernel/mm/transparent_hugepage/shmem_enabled") or "")
    shared = f"transparent ones of shared memory: {transparent[1] if transparent else 'unknown'}"
    return Finding(name, Verdict.INFO, "; ".join([*(pools or ["none reserved"]), shared]))
