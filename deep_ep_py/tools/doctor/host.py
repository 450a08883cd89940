"""The processors and memory of a machine, and the share of this process."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from deep_ep_py.base.cgroups import cpu_quota, memory_limit
from deep_ep_py.base.cpus import cpus_of
from deep_ep_py.base.machine_files import Files
from deep_ep_py.base.texts import size_text
from deep_ep_py.tools.doctor.findings import Finding, Section, Verdict, count

_ENOUGH_SHM = 1 << 30
_ENOUGH_CPUS = 2


def host(files: Files) -> Section:
    """Describe processors and memory."""
    return Section.of("Host", _host(files))


def kernel_version(files: Files) -> tuple[int, int] | None:
    """Return the Linux version, for example (6, 8); None if it is unknown."""
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
    # The list of allowed CPUs includes CPUs that are offline or not present.
    usable = len(allowed & online) if allowed and online else len(allowed or online)
    if not usable:
        return Finding("CPUs", Verdict.INFO, "unknown")
    quota = cpu_quota(files)
    limited = f", limited to the time of {quota:.3g} by its cgroup" if quota is not None and quota < usable else ""
    value = f"{usable} of {len(online) or usable} for this process{limited}, {numa}"
    if min(usable, usable if quota is None else quota) < _ENOUGH_CPUS:
        reason = "the thread that drives the network competes with those of the program"
        return Finding("CPUs", Verdict.WARNING, value, reason, "give the job more CPUs, for example docker run --cpus")
    return Finding("CPUs", Verdict.INFO, value)


def _memory(files: Files) -> Finding:
    limit = memory_limit(files)
    if limit is None:
        return Finding("memory", Verdict.INFO, "unknown")
    of = "the limit of this process's cgroup" if limit.of_cgroup else "all of the machine's memory"
    return Finding("memory", Verdict.INFO, f"{size_text(limit.bytes)}, {of}")


def _shared_memory(files: Files) -> Finding:
    name = "/dev/shm"
    why = "heaps are not there, but libfabric's provider shm and torch's data loaders need it"
    note = "if this is a container, start it with docker run --shm-size=8g or --ipc=host"
    try:
        place = files.path(name)
        found = None if place is None else os.statvfs(place)
    except OSError:
        found = None
    if found is None:
        return Finding(name, Verdict.WARNING, "missing", why, note)
    if not files.live:  # a copy is on another file system
        return Finding(name, Verdict.INFO, "present, size unknown", why)
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
