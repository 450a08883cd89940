"""The findings of `doctor` on processors, memory and limits."""

from __future__ import annotations

from pathlib import Path

import pytest

from deep_ep_py.base.cgroups import cpu_quota, free_memory, memory_limit
from deep_ep_py.base.machine_files import Files
from deep_ep_py.tools.doctor.findings import Verdict
from deep_ep_py.tools.doctor.host import host
from deep_ep_py.tools.doctor.limits import limits
from machine_trees import ALL_IDS, Tree, by_name, two_gpus_and_nics

pytestmark = pytest.mark.once

LOCKED, OPEN = "locked memory (ulimit -l)", "open files (ulimit -n)"
IPC_LOCK = "0000000000004000"


def live(root: Path) -> Files:
    return Files(root, live=True)


@pytest.mark.parametrize(
    ("cgroup", "files", "expected"),
    [
        ("0::/job/step", {"/job/memory.max": "4294967296", "/job/step/memory.max": "max"}, 4),
        ("0::/", {"/memory.max": "2147483648"}, 2),
        ("5:cpu:/x\n4:memory:/x", {"/memory/x/memory.limit_in_bytes": "1073741824"}, 1),
        ("4:memory:/", {"/memory/memory.limit_in_bytes": "9223372036854771712"}, None),
        ("0::/", {"/memory.max": "many"}, None),
    ],
)
def test_the_memory_of_a_cgroup(tmp_path: Path, cgroup: str, files: dict[str, str], expected: int | None) -> None:
    tree = Tree(tmp_path)
    tree.host()
    tree.file("/proc/self/cgroup", cgroup + "\n")
    for path, limit in files.items():
        tree.file(f"/sys/fs/cgroup{path}", limit + "\n")
    found = memory_limit(live(tmp_path))
    assert found is not None and found.of_cgroup == (expected is not None)
    assert found.bytes == (2113411284 << 10 if expected is None else expected << 30)
    of_a_copy = memory_limit(Files(tmp_path))
    assert of_a_copy is not None and not of_a_copy.of_cgroup


@pytest.mark.parametrize(
    ("cgroup", "files", "expected"),
    [
        ("0::/", {"memory.max": "max", "memory.current": "5000"}, 7000 << 10),
        ("0::/", {"memory.max": "3000000", "memory.current": "1000000"}, 2000000),
        (
            "0::/",
            {"memory.max": "3000000", "memory.current": "1000000", "memory.stat": "file 9\ninactive_file 7"},
            2000007,
        ),
        ("0::/", {"memory.max": "1000", "memory.current": "3000"}, 0),
        ("4:memory:/", {"memory/memory.limit_in_bytes": "900", "memory/memory.usage_in_bytes": "200"}, 700),
        (
            "4:memory:/",
            {"memory/memory.limit_in_bytes": "9223372036854771712", "memory/memory.usage_in_bytes": "2"},
            7000 << 10,
        ),
    ],
)
def test_the_memory_that_is_free(tmp_path: Path, cgroup: str, files: dict[str, str], expected: int) -> None:
    tree = Tree(tmp_path)
    tree.host()
    tree.file("/proc/meminfo", "MemTotal: 9000 kB\nMemAvailable: 7000 kB\n")
    tree.file("/proc/self/cgroup", cgroup + "\n")
    for name, text in files.items():
        tree.file(f"/sys/fs/cgroup/{name}", text + "\n")
    assert free_memory(live(tmp_path)) == expected


@pytest.mark.parametrize(
    ("cgroup", "files", "expected"),
    [
        ("0::/job", {"/job/cpu.max": "150000 100000"}, 1.5),
        ("0::/job", {"/cpu.max": "400000 100000", "/job/cpu.max": "max 100000"}, 4),
        ("0::/job", {"/job/cpu.max": "max 100000"}, None),
        ("3:cpu,cpuacct:/x", {"/cpu/x/cpu.cfs_quota_us": "50000", "/cpu/x/cpu.cfs_period_us": "100000"}, 0.5),
        ("3:cpu,cpuacct:/x", {"/cpu/x/cpu.cfs_quota_us": "-1", "/cpu/x/cpu.cfs_period_us": "100000"}, None),
        ("0::/job", {"/job/cpu.max": "1 0"}, None),
    ],
)
def test_the_time_of_a_cgroup(tmp_path: Path, cgroup: str, files: dict[str, str], expected: float | None) -> None:
    tree = Tree(tmp_path)
    tree.host()
    tree.file("/proc/self/cgroup", cgroup + "\n")
    for path, limit in files.items():
        tree.file(f"/sys/fs/cgroup{path}", limit + "\n")
    assert cpu_quota(live(tmp_path)) == expected
    cpus = by_name(host(live(tmp_path)))["CPUs"]
    assert (cpus.verdict is Verdict.WARNING) == (expected is not None and expected < 2)
    assert ("by its cgroup" in cpus.value) == (expected is not None)


@pytest.mark.parametrize(
    ("allowed", "online", "value"),
    [
        ("0-127", "0-63", "64 of 64 for this process, 1 NUMA node"),
        ("4-7", "0-63", "4 of 64 for this process, 1 NUMA node"),
        ("3", "0-63", "1 of 64 for this process, 1 NUMA node"),
        ("7-3", "odd", "unknown"),
    ],
)
def test_cpus_that_are_offline_do_not_count(tmp_path: Path, allowed: str, online: str, value: str) -> None:
    tree = Tree(tmp_path)
    tree.host()
    tree.status(allowed)
    tree.file("/sys/devices/system/cpu/online", online + "\n")
    found = by_name(host(live(tmp_path)))["CPUs"]
    assert found.value == value and (found.verdict is Verdict.WARNING) == value.startswith("1 ")


@pytest.mark.parametrize(
    ("soft", "hard", "verdict", "value", "command"),
    [
        ("1048576", "1048576", Verdict.GOOD, "1048576", ""),
        ("1024", "1048576", Verdict.WARNING, "1024, may be raised to 1048576", "ulimit -n 65536"),
        ("1024", "8192", Verdict.WARNING, "1024, may be raised to 8192", "ulimit -n 8192"),
        ("1024", "unlimited", Verdict.WARNING, "1024, may be raised to unlimited", "ulimit -n 65536"),
        ("1024", "2048", Verdict.WARNING, "1024, may be raised to 2048", "limits.d/nofile.conf"),
        ("unlimited", "unlimited", Verdict.GOOD, "unlimited", ""),
        ("many", "many", Verdict.INFO, "unknown", ""),
    ],
)
def test_open_files(tmp_path: Path, soft: str, hard: str, verdict: Verdict, value: str, command: str) -> None:
    Tree(tmp_path).host(files=soft, max_files=hard)
    found = by_name(limits(live(tmp_path)))[OPEN]
    assert (found.verdict, found.value) == (verdict, value)
    assert found.command.endswith(command) and bool(found.command) == bool(command)


@pytest.mark.parametrize(
    ("locked", "capabilities", "ids", "verdict"),
    [
        ("8388608", "0", ALL_IDS, Verdict.WARNING),
        ("8388608", IPC_LOCK, ALL_IDS, Verdict.GOOD),
        ("8388608", "000001ffffffbfff", ALL_IDS, Verdict.WARNING),  # all capabilities but this one
        ("8388608", IPC_LOCK, "0 1000 1\n", Verdict.WARNING),  # in a user namespace
        ("unlimited", "0", ALL_IDS, Verdict.GOOD),
        ("9007199254740992", "0", ALL_IDS, Verdict.GOOD),  # more than the machine has
    ],
)
def test_locked_memory(tmp_path: Path, locked: str, capabilities: str, ids: str, verdict: Verdict) -> None:
    tree, _ = two_gpus_and_nics(tmp_path)
    tree.file("/proc/self/limits", f"Max locked memory  {locked}  {locked}  bytes\n")
    tree.file("/proc/self/uid_map", ids)
    tree.status("0-1", capabilities)
    found = by_name(limits(live(tmp_path)))[LOCKED]
    assert found.verdict is verdict and ("CAP_IPC_LOCK" in found.value) == (
        verdict is Verdict.GOOD and ids == ALL_IDS and capabilities == IPC_LOCK
    )


def test_locked_memory_without_nics_is_no_matter(tmp_path: Path) -> None:
    Tree(tmp_path).host(locked="8388608")
    found = by_name(limits(live(tmp_path)))[LOCKED]
    assert found.verdict is Verdict.INFO and found.value == "8.0 MiB"


def test_a_container_without_shared_memory(tmp_path: Path) -> None:
    Tree(tmp_path).host()
    (tmp_path / "dev/shm").rmdir()
    found = by_name(host(live(tmp_path)))["/dev/shm"]
    assert found.verdict is Verdict.WARNING and "--shm-size" in found.note


def test_the_limits_of_a_copy_are_not_read(tmp_path: Path) -> None:
    tree, _ = two_gpus_and_nics(tmp_path)
    tree.file("/proc/self/limits", "Max locked memory  1  1  bytes\nMax open files  1  1  files\n")
    tree.status("3")
    tree.file("/proc/self/cgroup", "0::/\n")
    tree.file("/sys/fs/cgroup/cpu.max", "1 100000\n")
    copy = Files(tmp_path)
    assert [finding.value for finding in limits(copy).findings] == ["not read: --root"]
    assert by_name(host(copy))["CPUs"].value == "112 online, 1 NUMA node"
