"""The limits of this process for locked memory and open files."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from deep_ep_py.base.cgroups import memory_limit
from deep_ep_py.base.machine_files import Files
from deep_ep_py.base.texts import size_text
from deep_ep_py.tools.doctor.findings import Finding, Section, Verdict, not_read

_ENOUGH_FILES = 4096
"""A rank has a socket and a few descriptors per rank of its machine, and a socket per rank of other machines."""
_AMPLE_FILES = 65536
_IPC_LOCK = 14  # CAP_IPC_LOCK in linux/capability.h
_ALL_IDS = ["0", "0", "4294967295"]
_UNLIMITED = "unlimited"


@dataclass(frozen=True)
class _Limit:
    """The soft and hard limit of a resource; None: unlimited."""

    soft: int | None
    hard: int | None


def limits(files: Files) -> Section:
    """Describe the limits of this process."""
    return Section.of("Limits of this process", _limits(files) if files.live else [not_read("limits")])


def _limits(files: Files) -> Iterator[Finding]:
    locked, descriptors = _read(files, "Max locked memory"), _read(files, "Max open files")
    yield _locked_memory(locked, files) if locked else Finding("locked memory (ulimit -l)", Verdict.INFO, "unknown")
    yield _open_files(descriptors) if descriptors else Finding("open files (ulimit -n)", Verdict.INFO, "unknown")


def _read(files: Files, name: str) -> _Limit | None:
    found = re.search(
        rf"^{name}\s+(\d+|{_UNLIMITED})\s+(\d+|{_UNLIMITED})\s", files.text("/proc/self/limits") or "", re.M
    )
    return _Limit(*(None if one == _UNLIMITED else int(one) for one in found.groups())) if found else None


def _at_least(limit: int | None, enough: int) -> bool:
    return limit is None or limit >= enough


def _open_files(limit: _Limit) -> Finding:
    name = "open files (ulimit -n)"
    soft, hard = (_UNLIMITED if one is None else str(one) for one in (limit.soft, limit.hard))
    value = f"{soft}, may be raised to {hard}" if soft != hard else soft
    if _at_least(limit.soft, _ENOUGH_FILES):
        return Finding(name, Verdict.GOOD, value)
    reason = "each rank needs several descriptors for every other rank"
    if _at_least(limit.hard, _ENOUGH_FILES):
        to = _AMPLE_FILES if limit.hard is None else min(_AMPLE_FILES, limit.hard)
        return Finding(
            name, Verdict.WARNING, value, reason, "raise it in the shell that starts the job:", f"ulimit -n {to}"
        )
    return Finding(
        name,
        Verdict.WARNING,
        value,
        reason,
        f"raise the hard limit: for a container with docker run --ulimit nofile={_AMPLE_FILES}, otherwise with this "
        "and a new login:",
        f"echo '* - nofile {_AMPLE_FILES}' | sudo tee /etc/security/limits.d/nofile.conf",
    )


def _locked_memory(limit: _Limit, files: Files) -> Finding:
    name = "locked memory (ulimit -l)"
    if limit.soft is None:
        return Finding(name, Verdict.GOOD, _UNLIMITED)
    value, memory = size_text(limit.soft), memory_limit(files)
    if memory and limit.soft >= memory.bytes:
        return Finding(name, Verdict.GOOD, value)
    if _ignores_locked_memory(files):
        return Finding(name, Verdict.GOOD, f"{value}, but CAP_IPC_LOCK overrides it")
    if not files.names("/sys/class/infiniband"):
        return Finding(name, Verdict.INFO, value, "RDMA NICs would need more")
    reason = "memory that an RDMA NIC accesses must be locked: a larger heap is refused"
    if limit.hard is None:
        return Finding(
            name, Verdict.WARNING, value, reason, "raise it in the shell that starts the job:", "ulimit -l unlimited"
        )
    return Finding(
        name,
        Verdict.WARNING,
        value,
        reason,
        "raise the hard limit: for a container with docker run --ulimit memlock=-1, otherwise with this and a new "
        "login:",
        "echo '* - memlock unlimited' | sudo tee /etc/security/limits.d/memlock.conf",
    )


def _ignores_locked_memory(files: Files) -> bool:
    """Return whether registering memory may exceed the limit.

    That requires CAP_IPC_LOCK in the initial user namespace; in the namespace of a rootless container it has no effect.
    """
    capabilities = re.search(r"^CapEff:\s*([0-9a-fA-F]+)", files.text("/proc/self/status") or "", re.MULTILINE)
    has = capabilities is not None and bool(int(capabilities[1], 16) >> _IPC_LOCK & 1)
    return has and (files.text("/proc/self/uid_map") or "").split() == _ALL_IDS
