"""The findings of `doctor` on RDMA NICs, on fictitious machines."""

from __future__ import annotations

from pathlib import Path

import pytest

from deep_ep_py.base.machine_files import Files
from deep_ep_py.tools.doctor.findings import Finding, Verdict
from deep_ep_py.tools.doctor.network import network
from deep_ep_py.tools.doctor.nics import read_nics
from deep_ep_py.tools.doctor.pci import RelaxedOrdering, read_device, read_gpus
from machine_trees import NETWORK, Tree, by_name, efa, express_config, roce, two_gpus_and_nics

pytestmark = pytest.mark.once


def found_in(root: Path) -> dict[str, Finding]:
    return by_name(network(Files(root), None))


def test_two_gpus_and_two_nics_of_infiniband(tmp_path: Path) -> None:
    two_gpus_and_nics(tmp_path)
    found = found_in(tmp_path)
    assert found["mlx5_0"].verdict is Verdict.GOOD and "28.42.1000" in found["mlx5_0"].value
    assert found["mlx5_0 port 1"].value == "InfiniBand, 400 Gb/sec (4X NDR), ACTIVE"
    assert found["mlx5_0 nearest GPU"].value == "PIX to 0000:18:00.0"
    assert found["mlx5_1 nearest GPU"].value == "PIX to 0000:a8:00.0"
    assert found["mlx5_0 relaxed ordering"].value == "allowed"
    assert found["mlx5_1 relaxed ordering"].value == "not allowed"
    assert found["posting by kernels (IBGDA)"].value == "possible on mlx5_0, mlx5_1"


def test_efa(tmp_path: Path) -> None:
    efa(tmp_path)
    found = found_in(tmp_path)
    assert found["rdmap0s31"].verdict is Verdict.INFO and "provider efa" in found["rdmap0s31"].reason
    assert "PCI ID 1d0f:efa2" in found["rdmap0s31"].value
    port = found["rdmap0s31 port 1"]
    assert port.verdict is Verdict.GOOD and port.value.startswith("EFA, ")
    assert found["rdmap0s31 nearest GPU"].value == "PHB to 0000:01:00.0"
    assert not any("NVSHMEM" in name or "IBGDA" in name or "ECE" in name for name in found)


def test_roce_says_its_address_and_class(tmp_path: Path) -> None:
    tree, _ = roce(tmp_path)
    tree.file("/sys/class/infiniband/mlx5_0/tc/1/traffic_class", "Global tclass=106\n")
    found = found_in(tmp_path)["mlx5_0 port 1"]
    assert found.verdict is Verdict.GOOD
    assert found.value.endswith("traffic class 106 by the system, RoCEv2 at 10.0.1.2 of eth2 (GID 3)")


def test_what_firmware_keeps_is_asked_of_the_nics_that_are_used(tmp_path: Path) -> None:
    tree, ports = roce(tmp_path)
    tree.states(ports[0], "1: DOWN", "2: Polling")
    found = found_in(tmp_path)["adaptive routing, ECE (RoCE)"]
    assert "0000:a9:00.0" in found.command and "0000:19:00.0" not in found.command


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Global tclass=106\n", 106),
        ("Global tclass=0x6a\n", 106),
        ("Global tclass=106\nsrc_ip=10.0.0.1,dst_ip=10.0.0.2/32,tclass=96\n", 106),
        ("src_ip=10.0.0.1,dst_ip=10.0.0.2/32,tclass=96\n", None),
        ("tclass=96\n", None),
        ("Global tclass=\n", None),
        ("", None),
    ],
)
def test_rules_for_some_flows_are_not_the_class_of_a_port(tmp_path: Path, text: str, expected: int | None) -> None:
    tree, _ = roce(tmp_path)
    tree.file("/sys/class/infiniband/mlx5_0/tc/1/traffic_class", text)
    assert read_nics(Files(tmp_path))[0].ports[0].traffic_class == expected


@pytest.mark.parametrize(
    ("gids", "text"),
    [({0: "RoCE v2", 1: "IB/RoCE v1"}, "only link-local RoCEv2 GIDs"), ({0: "IB/RoCE v1"}, "no RoCEv2 GID")],
)
def test_roce_without_a_routable_address(tmp_path: Path, gids: dict[int, str], text: str) -> None:
    tree, ports = two_gpus_and_nics(tmp_path, "Ethernet")
    for index, kind in gids.items():
        tree.gid(ports[0], index, "fe80:0000:0000:0000:a288:c2ff:fe8c:1f32", kind, "eth2")
    found = found_in(tmp_path)["mlx5_0 port 1"]
    assert found.verdict is Verdict.WARNING and found.value.endswith(text) and found.command.endswith("dev eth2")


@pytest.mark.parametrize(
    ("layer", "state", "physical", "command"),
    [
        ("InfiniBand", "1: DOWN", "2: Polling", "ibstat mlx5_1 1"),
        ("InfiniBand", "2: INIT", "5: LinkUp", "sudo sminfo -C mlx5_1 -P 1"),
        ("InfiniBand", "3: ARMED", "5: LinkUp", "sudo sminfo -C mlx5_1 -P 1"),
        ("InfiniBand", "1: DOWN", "3: Disabled", "ibstat mlx5_1 1"),
        ("Ethernet", "1: DOWN", "3: Disabled", "sudo ip link set eth3 up"),
    ],
)
def test_a_port_that_carries_nothing(tmp_path: Path, layer: str, state: str, physical: str, command: str) -> None:
    tree, ports = two_gpus_and_nics(tmp_path, layer)
    tree.states(ports[1], state, physical)
    tree.gid(ports[1], 0, "fe80:0000:0000:0000:a288:c2ff:fe8c:1f32", "RoCE v2", "eth3")
    found = found_in(tmp_path)["mlx5_1 port 1"]
    assert found.verdict is Verdict.WARNING and found.command == command
    assert physical.split(": ")[1] in found.value


def test_names_from_files_run_nothing(tmp_path: Path) -> None:
    tree, ports = two_gpus_and_nics(tmp_path, "Ethernet")
    tree.gid(ports[0], 0, "fe80:0000:0000:0000:a288:c2ff:fe8c:1f32", "RoCE v2", "eth2;reboot")
    assert found_in(tmp_path)["mlx5_0 port 1"].command.endswith("dev 'eth2;reboot'")


def test_iwarp_is_not_judged_as_roce(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    folder = tree.device("pci0000:00", "0000:02:00.0", "0x8086", NETWORK)
    port = tree.nic("irdma0", folder, "Ethernet", driver="ice", node_type="4: RNIC")
    tree.gid(port, 0, "a288:c2ff:fe8c:0000:0000:0000:0000:0000", "IB/RoCE v1", "eth2")
    found = found_in(tmp_path)
    assert found["irdma0"].verdict is Verdict.INFO and "iWARP" in found["irdma0"].reason
    assert found["irdma0 port 1"].verdict is Verdict.INFO and found["irdma0 port 1"].value.startswith("iWARP, ")


def test_nics_of_software(tmp_path: Path) -> None:
    tree, _ = two_gpus_and_nics(tmp_path)
    tree.software_nic("rxe0", "Ethernet", parent="eth0")
    tree.software_nic("siw0", "Ethernet", node_type="4: RNIC")
    # As on older kernels: the device belongs to the interface.
    folder = tree.device("pci0000:00", "0000:03:00.0", "0x1af4", NETWORK)
    tree.nic("rxe1", folder, "Ethernet", driver="virtio-pci")
    tree.file("/sys/class/infiniband/rxe1/parent", "eth1\n")
    found = found_in(tmp_path)
    values = {name: found[name].value for name in ("rxe0", "rxe1", "siw0")}
    assert values == {
        "rxe0": "software, on eth0",
        "rxe1": "software, on eth1",
        "siw0": "software",
    }
    for name in values:
        assert found[name].verdict is found[f"{name} port 1"].verdict is Verdict.INFO
        assert f"{name} nearest GPU" not in found and f"{name} relaxed ordering" not in found


def test_a_subfunction_is_on_the_device_of_its_parent(tmp_path: Path) -> None:
    tree, _ = two_gpus_and_nics(tmp_path)
    parent = read_nics(Files(tmp_path))[0].device
    assert parent is not None
    place = Files(tmp_path).resolved(f"/sys/bus/pci/devices/{parent.address}")
    tree.nic("mlx5_7", f"{place}/mlx5_core.sf.4", "InfiniBand", driver="mlx5_core.sf")
    found = next(nic for nic in read_nics(Files(tmp_path)) if nic.name == "mlx5_7")
    assert found.is_connectx and found.device == parent


def test_a_virtual_machine_that_says_nothing_of_distances(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.gpu("pci0001:00", "0001:00:00.0", numa=-1)
    folder = tree.device("pci0002:00", "0002:00:00.0", "0x15b3", NETWORK, numa=-1, device="0x101e")
    tree.nic("mlx5_0", folder, "InfiniBand")
    found = found_in(tmp_path)
    assert found["mlx5_0 nearest GPU"].verdict is Verdict.INFO
    assert "virtual function" in found["mlx5_0"].value
    assert found["mlx5_0 relaxed ordering"].value == "not readable here"


def test_a_nic_that_is_far_where_others_are_near(tmp_path: Path) -> None:
    tree, _ = two_gpus_and_nics(tmp_path)
    folder = tree.device("pci0000:f0/0000:f0:01.0", "0000:f1:00.0", "0x15b3", NETWORK, numa=7)
    tree.nic("mlx5_2", folder, "InfiniBand")
    found = found_in(tmp_path)["mlx5_2 nearest GPU"]
    assert found.verdict is Verdict.WARNING and "mlx5_0, mlx5_1" in found.reason


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
    assert one is not None and other is not None and one.way_to(other) == other.way_to(one) == way


def test_devices_of_two_sockets(tmp_path: Path) -> None:
    two_gpus_and_nics(tmp_path)
    one, other = read_gpus(Files(tmp_path))
    assert one.way_to(other) == "SYS"


def looped() -> bytes:
    config = bytearray(express_config(True))
    config[0x41] = 0x40
    return bytes(config)


@pytest.mark.parametrize(
    ("config", "device", "expected"),
    [
        (express_config(True), "0x1021", RelaxedOrdering.ALLOWED),
        (express_config(False), "0x1021", RelaxedOrdering.FORBIDDEN),
        (express_config(True)[:64], "0x1021", RelaxedOrdering.NOT_READABLE),  # as without root privileges
        (looped(), "0x1021", RelaxedOrdering.NOT_READABLE),
        (express_config(False), "0x101e", RelaxedOrdering.OF_PHYSICAL_FUNCTION),
    ],
)
def test_relaxed_ordering(tmp_path: Path, config: bytes, device: str, expected: RelaxedOrdering) -> None:
    folder = Tree(tmp_path).device("pci0000:00", "0000:02:00.0", "0x15b3", NETWORK, config=config, device=device)
    found = read_device(Files(tmp_path), folder)
    assert found is not None and found.relaxed_ordering is expected


def test_a_virtual_function_has_the_ordering_of_its_physical_one(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    physical = tree.device("pci0000:00", "0000:02:00.0", "0x15b3", NETWORK, config=express_config(True))
    folder = tree.device("pci0000:00", "0000:02:00.1", "0x15b3", NETWORK, config=express_config(False), device="0x101e")
    tree.link(f"{folder}/physfn", physical)
    found = read_device(Files(tmp_path), folder)
    assert found is not None and found.virtual_function and found.relaxed_ordering is RelaxedOrdering.ALLOWED
