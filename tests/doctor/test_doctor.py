"""`doctor` on made-up machines, and on this one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from deep_ep_py.cli.doctor import command
from deep_ep_py.doctor.files import Files
from deep_ep_py.doctor.findings import Finding, Section, Verdict, worst
from deep_ep_py.doctor.gpus import gpus
from deep_ep_py.doctor.host import host, memory_limit
from deep_ep_py.doctor.network import TRAFFIC_CLASS, network
from deep_ep_py.doctor.pci import read_device, read_gpus
from launches import of_ranks
from machine_trees import NETWORK, Tree, express_config, two_gpus_and_nics

pytestmark = pytest.mark.once


def by_name(section: Section) -> dict[str, Finding]:
    found = {finding.name: finding for finding in section.findings}
    assert len(found) == len(section.findings), "two findings of one name"
    return found


def roce(root: Path) -> tuple[Tree, list[str]]:
    tree, ports = two_gpus_and_nics(root, "Ethernet")
    for port, interface in zip(ports, ("eth2", "eth3")):
        tree.gid(port, 0, "fe80:0000:0000:0000:a288:c2ff:fe8c:1f32", "IB/RoCE v1", interface)
        tree.gid(port, 1, "fe80:0000:0000:0000:a288:c2ff:fe8c:1f32", "RoCE v2", interface)
        tree.gid(port, 2, "0000:0000:0000:0000:0000:ffff:0a00:0102", "IB/RoCE v1", interface)
        tree.gid(port, 3, "0000:0000:0000:0000:0000:ffff:0a00:0102", "RoCE v2", interface)
        tree.gid(port, 4, "0000:0000:0000:0000:0000:0000:0000:0000", "", "")
    return tree, ports


def test_two_gpus_and_two_nics_of_infiniband(tmp_path: Path) -> None:
    two_gpus_and_nics(tmp_path)
    found = by_name(network(Files(tmp_path), {}))
    assert found["mlx5_0"].verdict is Verdict.GOOD and "28.42.1000" in found["mlx5_0"].value
    assert found["mlx5_0 port 1"].value == "InfiniBand, 400 Gb/sec (4X NDR), ACTIVE"
    assert found["mlx5_0 nearest GPU"].value == "PIX to 0000:18:00.0"
    assert found["mlx5_1 nearest GPU"].value == "PIX to 0000:a8:00.0"
    assert found["mlx5_0 relaxed ordering"].value == "allowed"
    assert found["mlx5_1 relaxed ordering"].value == "not allowed"
    assert "traffic class" not in found and found["service level"].verdict is Verdict.GOOD
    driver = by_name(gpus(Files(tmp_path)))
    assert driver["driver"].value == "570.86.15, open kernel modules"
    assert driver["GPU 1"].value == "NVIDIA H100 80GB HBM3, PCI 0000:a8:00.0, NUMA node 1"
    assert driver["doorbells from GPUs"].verdict is Verdict.GOOD
    assert driver["NICs to GPU memory"].value == "nvidia_peermem is loaded"


def test_a_traffic_class_on_infiniband_is_an_error(tmp_path: Path) -> None:
    two_gpus_and_nics(tmp_path)
    found = by_name(network(Files(tmp_path), {TRAFFIC_CLASS: "106"}))["traffic class"]
    assert found.verdict is Verdict.ERROR and found.advice == f"unset {TRAFFIC_CLASS}"


@pytest.mark.parametrize(
    ("given", "verdict", "text"),
    [
        (None, Verdict.WARNING, "is not set; the system has 106"),
        ("96", Verdict.WARNING, "=96, and the system has 106"),
        ("106", Verdict.GOOD, "=106"),
    ],
)
def test_the_traffic_class_of_roce(tmp_path: Path, given: str | None, verdict: Verdict, text: str) -> None:
    tree, _ = roce(tmp_path)
    tree.file("/sys/class/infiniband/mlx5_0/tc/1/traffic_class", "Global tclass=106\n")
    tree.file("/sys/kernel/config/rdma_cm/mlx5_1/ports/1/default_roce_tos", "106\n")
    found = by_name(network(Files(tmp_path), {TRAFFIC_CLASS: given} if given else {}))
    assert found["traffic class"].verdict is verdict and found["traffic class"].value.endswith(text)
    assert "RoCEv2 at 10.0.1.2 of eth2 (GID 3)" in found["mlx5_0 port 1"].value


def test_roce_without_a_routable_address(tmp_path: Path) -> None:
    tree, ports = two_gpus_and_nics(tmp_path, "Ethernet")
    tree.gid(ports[0], 0, "fe80:0000:0000:0000:a288:c2ff:fe8c:1f32", "RoCE v2", "eth2")
    found = by_name(network(Files(tmp_path), {TRAFFIC_CLASS: "106"}))["mlx5_0 port 1"]
    assert found.verdict is Verdict.ERROR and found.advice.endswith("dev eth2")


def test_a_port_without_a_link(tmp_path: Path) -> None:
    tree, _ = two_gpus_and_nics(tmp_path)
    tree.file("/sys/class/infiniband/mlx5_1/ports/1/state", "1: DOWN\n")
    found = by_name(network(Files(tmp_path), {}))["mlx5_1 port 1"]
    assert found.verdict is Verdict.WARNING and "ibstat mlx5_1" in found.advice


def test_an_efa_machine(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.host(locked="8388608")
    tree.driver(opened=False, override=False)
    tree.gpu("pci0000:00/0000:00:1e.0", "0000:01:00.0")
    folder = tree.device("pci0000:00/0000:00:1f.0", "0000:02:00.0", "0x1d0f", NETWORK)
    tree.nic("rdmap0s31", folder, "Unspecified", driver="efa")
    found = by_name(network(Files(tmp_path), {}))
    assert found["rdmap0s31"].verdict is Verdict.INFO and "provider 'efa'" in found["rdmap0s31"].reason
    assert found["rdmap0s31 port 1"].verdict is Verdict.GOOD
    assert found["rdmap0s31 nearest GPU"].value == "PHB to 0000:01:00.0"
    assert "traffic class" not in found and "adaptive routing, ECE" not in found
    driver = by_name(gpus(Files(tmp_path)))
    assert driver["driver"].value == "535.104.05, proprietary kernel modules"
    assert driver["NICs to GPU memory"].verdict is Verdict.INFO
    assert driver["doorbells from GPUs"].verdict is Verdict.WARNING
    locked = by_name(host(Files(tmp_path)))["locked memory (ulimit -l)"]
    assert locked.verdict is Verdict.WARNING and locked.value == "8.0 MiB"


def test_gpus_without_a_driver(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.gpu("pci0000:00/0000:00:1e.0", "0000:01:00.0")
    assert by_name(gpus(Files(tmp_path)))["driver"].verdict is Verdict.ERROR


@pytest.mark.parametrize(
    ("first", "second", "way"),
    [
        (
            "pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:00.0",
            "pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:01.0",
            "PIX",
        ),
        (
            "pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:00.0/0000:18:00.0/0000:19:00.0",
            "pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:01.0",
            "PXB",
        ),
        ("pci0000:15/0000:15:01.0", "pci0000:15/0000:15:02.0", "PHB"),
        ("pci0000:15/0000:15:01.0", "pci0000:a5/0000:a5:01.0", "NODE"),
    ],
)
def test_the_way_between_devices(tmp_path: Path, first: str, second: str, way: str) -> None:
    tree, files = Tree(tmp_path), Files(tmp_path)
    folders = tree.device(first, "0000:40:00.0", "0x10de", NETWORK), tree.device(second, "0000:41:00.0", "1", NETWORK)
    one, other = (read_device(files, folder) for folder in folders)
    assert one.way_to(other) == other.way_to(one) == way


def test_devices_of_two_sockets(tmp_path: Path) -> None:
    two_gpus_and_nics(tmp_path)
    one, other = read_gpus(Files(tmp_path))
    assert one.way_to(other) == "SYS"


def test_what_only_root_may_read_is_not_guessed(tmp_path: Path) -> None:
    tree, files = Tree(tmp_path), Files(tmp_path)
    short = tree.device("pci0000:00", "0000:02:00.0", "1", NETWORK, config=express_config(True)[:64])
    looped = bytearray(express_config(True))
    looped[0x41] = 0x40
    endless = tree.device("pci0000:00", "0000:03:00.0", "1", NETWORK, config=bytes(looped))
    assert [read_device(files, folder).relaxed_ordering for folder in (short, endless)] == [None, None]


@pytest.mark.parametrize(
    ("cgroup", "limits", "expected"),
    [
        (
            "0::/job/step",
            {"/sys/fs/cgroup/job/memory.max": "4294967296", "/sys/fs/cgroup/job/step/memory.max": "max"},
            4,
        ),
        ("0::/", {"/sys/fs/cgroup/memory.max": "2147483648"}, 2),
        ("5:cpu:/x\n4:memory:/x", {"/sys/fs/cgroup/memory/x/memory.limit_in_bytes": "1073741824"}, 1),
        ("4:memory:/", {"/sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712"}, None),
    ],
)
def test_the_memory_of_a_cgroup(tmp_path: Path, cgroup: str, limits: dict[str, str], expected: int | None) -> None:
    tree = Tree(tmp_path)
    tree.host()
    tree.file("/proc/self/cgroup", cgroup + "\n")
    for path, limit in limits.items():
        tree.file(path, limit + "\n")
    found = memory_limit(Files(tmp_path))
    assert found is not None
    assert found.of_cgroup == (expected is not None)
    assert found.bytes == (2113411284 << 10 if expected is None else expected << 30)


def test_a_container_without_shared_memory(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.host(files=1024)
    (tmp_path / "dev/shm").rmdir()
    found = by_name(host(Files(tmp_path)))
    assert found["/dev/shm"].verdict is Verdict.WARNING and "--shm-size" in found["/dev/shm"].advice
    assert found["open files (ulimit -n)"].verdict is Verdict.WARNING


def test_nothing_at_all(tmp_path: Path) -> None:
    """As on a system that tells nothing: no error, and nothing raised."""
    done = CliRunner().invoke(command, ["--root", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "none of NVIDIA's" in done.output and "Software" not in done.output


def test_what_makes_no_sense_is_not_believed(tmp_path: Path) -> None:
    tree, ports = roce(tmp_path)
    tree.gid(ports[0], 5, "not an address", "RoCE v2", "eth2")
    tree.file(f"{ports[0]}/gids/odd", "fe80::1")
    tree.file(f"{ports[0]}/rate", b"\xff\xfe")
    tree.file("/sys/class/infiniband/mlx5_0/ports/x/state", "4: ACTIVE")
    tree.file("/proc/self/status", "Cpus_allowed_list:\t7-3\n")
    tree.file("/proc/self/limits", "Max locked memory  many  many  bytes\n")
    circle = tmp_path / "sys/class/infiniband/mlx5_9"
    circle.mkdir()
    (circle / "device").symlink_to("device")
    done = CliRunner().invoke(command, ["--root", str(tmp_path)])
    assert done.exit_code in (0, 1) and (done.exception is None or isinstance(done.exception, SystemExit)), done.output
    assert "RoCEv2 at 10.0.1.2 of eth2 (GID 3)" in " ".join(done.output.split())


def test_every_finding_that_is_no_good_says_why(tmp_path: Path) -> None:
    trees = {"ib": two_gpus_and_nics, "roce": roce, "none": lambda root: Tree(root)}
    for name, make in trees.items():
        (tmp_path / name).mkdir()
        make(tmp_path / name)
        files = Files(tmp_path / name)
        for section in (host(files), gpus(files), network(files, {TRAFFIC_CLASS: "1"})):
            for finding in section.findings:
                if finding.verdict in (Verdict.WARNING, Verdict.ERROR):
                    assert finding.reason, finding


def test_an_error_is_the_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    two_gpus_and_nics(tmp_path)
    monkeypatch.setenv(TRAFFIC_CLASS, "106")
    done = CliRunner().invoke(command, ["--root", str(tmp_path), "--json", str(tmp_path / "report.json")])
    assert done.exit_code == 1 and "1 error" in done.output
    report = json.loads((tmp_path / "report.json").read_text())
    verdicts = {one["name"]: one["verdict"] for section in report["sections"] for one in section["findings"]}
    assert verdicts["traffic class"] == "error"


def test_this_machine(tmp_path: Path) -> None:
    """The command as a user types it."""
    file = tmp_path / "report.json"
    command_line = [sys.executable, "-m", "deep_ep_py", "doctor", "--json", str(file)]
    done = subprocess.run(command_line, env=of_ranks(), capture_output=True, text=True, timeout=120)
    assert done.returncode in (0, 1), done.stderr
    assert "deep_ep_py" in done.stdout and all(len(line) <= 80 for line in done.stdout.splitlines()), done.stdout
    titles = [section["title"] for section in json.loads(file.read_text())["sections"]]
    assert titles == ["Host", "GPUs", "RDMA NICs", "Software", "Paths"]


def test_the_worst_verdict() -> None:
    sections = [Section.of("x", [Finding("a", verdict, "") for verdict in (Verdict.GOOD, Verdict.WARNING)])]
    assert worst(sections) is Verdict.WARNING and worst([]) is Verdict.GOOD
