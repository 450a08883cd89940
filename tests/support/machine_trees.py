"""Folders that look like a machine's /proc, /sys and /dev."""

from __future__ import annotations

import os
from pathlib import Path

from deep_ep_py.tools.doctor.findings import Finding, Section

CONTROLLER, NETWORK = "0x030200", "0x020700"
ALL_IDS = "         0          0 4294967295\n"
_OPEN_DRIVER = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build"
_CLOSED_DRIVER = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023"


class Tree:
    """A machine, built up file by file."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def file(self, path: str, content: str | bytes = "") -> None:
        place = self.root / path.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content.encode() if isinstance(content, str) else content)

    def link(self, path: str, target: str) -> None:
        place, to = self.root / path.lstrip("/"), self.root / target.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        to.mkdir(parents=True, exist_ok=True)
        place.symlink_to(os.path.relpath(to, place.parent))

    def device(
        self,
        above: str,
        address: str,
        vendor: str,
        kind: str,
        numa: int = 0,
        config: bytes = b"",
        device: str = "0x1021",
    ) -> str:
        """Add a PCI device below others, such as "pci0000:15/0000:15:01.0". Returns its folder."""
        folder = f"/sys/devices/{above}/{address}"
        for name, text in {"vendor": vendor, "device": device, "class": kind, "numa_node": str(numa)}.items():
            self.file(f"{folder}/{name}", text + "\n")
        self.file(f"{folder}/config", config or bytes(64))
        self.link(f"/sys/bus/pci/devices/{address}", folder)
        return folder

    def gpu(self, above: str, address: str, model: str = "NVIDIA H100 80GB HBM3", numa: int = 0) -> None:
        self.device(above, address, "0x10de", CONTROLLER, numa)
        self.file(f"/proc/driver/nvidia/gpus/{address}/information", f"Model: \t\t {model}\nIRQ:   \t\t 31\n")

    def driver(self, opened: bool = True, words: str = "PeerMappingOverride=1;") -> None:
        self.file("/proc/driver/nvidia/version", _OPEN_DRIVER if opened else _CLOSED_DRIVER)
        self.file("/proc/driver/nvidia/params", f'EnableStreamMemOPs: 1\nRegistryDwords: "{words}"\n')

    def nic(self, name: str, folder: str, layer: str, driver: str = "mlx5_core", node_type: str = "1: CA") -> str:
        """Add a NIC with one port that has a link. Returns the port's folder."""
        place = f"/sys/class/infiniband/{name}"
        self.link(f"{place}/device", folder)
        self.link(f"{folder}/driver", f"/sys/bus/pci/drivers/{driver}")
        self.file(f"{place}/fw_ver", "28.42.1000\n")
        self.file(f"{place}/hca_type", "MT4129\n")
        return self._port(place, layer, node_type)

    def software_nic(self, name: str, layer: str, node_type: str = "1: CA", parent: str = "") -> str:
        """Add a NIC that is on no PCI device. Returns the port's folder."""
        place = f"/sys/devices/virtual/infiniband/{name}"
        self.link(f"/sys/class/infiniband/{name}", place)
        if parent:
            self.file(f"{place}/parent", parent + "\n")
        return self._port(place, layer, node_type)

    def _port(self, place: str, layer: str, node_type: str) -> str:
        self.file(f"{place}/node_type", node_type + "\n")
        port = f"{place}/ports/1"
        self.file(f"{port}/rate", "400 Gb/sec (4X NDR)\n")
        self.file(f"{port}/link_layer", layer + "\n")
        self.states(port, "4: ACTIVE", "5: LinkUp")
        return port

    def states(self, port: str, state: str, physical: str) -> None:
        self.file(f"{port}/state", state + "\n")
        self.file(f"{port}/phys_state", physical + "\n")

    def gid(self, port: str, index: int, value: str, kind: str, interface: str) -> None:
        self.file(f"{port}/gids/{index}", value + "\n")
        if kind:
            self.file(f"{port}/gid_attrs/types/{index}", kind + "\n")
            self.file(f"{port}/gid_attrs/ndevs/{index}", interface + "\n")

    def host(
        self, locked: str = "unlimited", files: str = "1048576", max_files: str = "1048576", kernel: str = "6.8.0-45"
    ) -> None:
        (self.root / "dev/shm").mkdir(parents=True)
        self.file("/proc/sys/kernel/osrelease", kernel + "\n")
        self.file("/proc/meminfo", "MemTotal:       2113411284 kB\nMemFree: 1 kB\n")
        self.file("/sys/devices/system/cpu/online", "0-111\n")
        self.status("0-111")
        self.file("/proc/self/uid_map", ALL_IDS)
        limits = f"Limit  Soft Limit  Hard Limit  Units\nMax locked memory  {locked}  {locked}  bytes\n"
        self.file("/proc/self/limits", limits + f"Max open files  {files}  {max_files}  files\n")

    def status(self, cpus: str, capabilities: str = "0000000000000000") -> None:
        self.file("/proc/self/status", f"Name:\tpython\nCapEff:\t{capabilities}\nCpus_allowed_list:\t{cpus}\n")


def two_gpus_and_nics(root: Path, layer: str = "InfiniBand") -> tuple[Tree, list[str]]:
    """Add a GPU and a NIC on each of two PCIe switches, one per socket. Returns the ports' folders."""
    tree, ports = Tree(root), []
    tree.host()
    tree.driver()
    for socket, bus in enumerate(("15", "a5")):
        switch = f"pci0000:{bus}/0000:{bus}:01.0/0000:{bus[0]}6:00.0"
        tree.gpu(f"{switch}/0000:{bus[0]}7:00.0", f"0000:{bus[0]}8:00.0", numa=socket)
        config = express_config(relaxed=socket == 0)
        folder = tree.device(f"{switch}/0000:{bus[0]}7:01.0", f"0000:{bus[0]}9:00.0", "0x15b3", NETWORK, socket, config)
        ports.append(tree.nic(f"mlx5_{socket}", folder, layer))
    tree.file("/sys/module/nvidia_peermem/version", "570.86.15")
    return tree, ports


def express_config(relaxed: bool) -> bytes:
    """Return a configuration space with the power management capability at 0x40 and the PCI Express one at 0x60."""
    config = bytearray(256)
    config[6] = 0x10
    config[0x34] = 0x40
    config[0x40:0x42] = bytes([0x01, 0x60])
    config[0x60:0x62] = bytes([0x10, 0x00])
    config[0x68] = 0x10 if relaxed else 0x00
    return bytes(config)


def roce(root: Path) -> tuple[Tree, list[str]]:
    """The same with RoCE, whose ports have addresses in Linux's format."""
    tree, ports = two_gpus_and_nics(root, "Ethernet")
    for port, interface in zip(ports, ("eth2", "eth3")):
        tree.gid(port, 0, "fe80:0000:0000:0000:a288:c2ff:fe8c:1f32", "IB/RoCE v1", interface)
        tree.gid(port, 1, "fe80:0000:0000:0000:a288:c2ff:fe8c:1f32", "RoCE v2", interface)
        tree.gid(port, 2, "0000:0000:0000:0000:0000:ffff:0a00:0102", "IB/RoCE v1", interface)
        tree.gid(port, 3, "0000:0000:0000:0000:0000:ffff:0a00:0102", "RoCE v2", interface)
        tree.gid(port, 4, "0000:0000:0000:0000:0000:0000:0000:0000", "", "")
    return tree, ports


def efa(root: Path) -> Tree:
    """Make a machine with a GPU and EFA, whose link layer the kernel does not know."""
    tree = Tree(root)
    tree.host(locked="8388608")
    tree.driver(opened=False, words="")
    tree.gpu("pci0000:00/0000:00:1e.0", "0000:01:00.0")
    folder = tree.device("pci0000:00/0000:00:1f.0", "0000:02:00.0", "0x1d0f", NETWORK, device="0xefa2")
    tree.nic("rdmap0s31", folder, "Unknown", driver="efa", node_type="7: unspecified")
    tree.file("/sys/class/infiniband/rdmap0s31/hca_type", "")
    return tree


def by_name(section: Section) -> dict[str, Finding]:
    """Return a section's findings by name; names must be unique."""
    found = {finding.name: finding for finding in section.findings}
    assert len(found) == len(section.findings), "two findings with the same name"
    return found
