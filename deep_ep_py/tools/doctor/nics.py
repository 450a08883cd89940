"""RDMA NICs, as described by the kernel in /sys/class/infiniband."""

from __future__ import annotations

import enum
import ipaddress
import re
from dataclasses import dataclass

from deep_ep_py.base.machine_files import Files
from deep_ep_py.tools.doctor.pci import PciDevice, read_device

IBGDA_DRIVER = "mlx5_core"

_CLASS = "/sys/class/infiniband"
_IWARP = 4  # RDMA_NODE_RNIC of the kernel
_NO_GID = "0000:0000:0000:0000:0000:0000:0000:0000"


@dataclass(frozen=True)
class Gid:
    """An address (GID) of a port.

    Attributes
    ----------
    index : int
        The index, as in NVSHMEM_IB_GID_INDEX.
    value : str
        The 128 bits in IPv6 notation.
    kind : str
        The kernel's name of the kind: "IB/RoCE v1" or "RoCE v2".
    interface : str
        The network interface that it belongs to; empty if there is none.
    """

    index: int
    value: str
    kind: str
    interface: str

    @property
    def routable(self) -> bool:
        """Whether it is a RoCEv2 GID whose packets can pass routers."""
        return self.is_version_2 and not ipaddress.IPv6Address(self.value).is_link_local

    @property
    def is_version_2(self) -> bool:
        """Whether it is a RoCEv2 GID, whose packets travel in UDP."""
        return self.kind == "RoCE v2"

    @property
    def address(self) -> str:
        """The address in its usual notation."""
        address = ipaddress.IPv6Address(self.value)
        return str(address.ipv4_mapped or address)


class Link(enum.Enum):
    """The protocol of a port."""

    INFINIBAND = "InfiniBand"
    ROCE = "RoCE"
    IWARP = "iWARP"
    EFA = "EFA"
    OTHER = "unknown link layer"


@dataclass(frozen=True)
class Port:
    """A port of a NIC.

    Attributes
    ----------
    number : int
        The port number, from 1.
    state : str
        The logical state, for example "ACTIVE".
    physical_state : str
        The physical state, for example "LinkUp"; empty if the kernel does not report it.
    rate : str
        The rate, as reported by the kernel.
    link : Link
        The protocol.
    gids : tuple of Gid
        The GIDs that are set.
    interface : str
        The network interface; empty if it has none.
    traffic_class : int or None
        The system's traffic class for RoCE; None if it is not set, or cannot be read.
    """

    number: int
    state: str
    physical_state: str
    rate: str
    link: Link
    gids: tuple[Gid, ...]
    interface: str
    traffic_class: int | None


@dataclass(frozen=True)
class Nic:
    """An RDMA NIC.

    Attributes
    ----------
    name : str
        The name, for example "mlx5_0".
    driver : str
        The kernel module, for example "mlx5_core" or "efa"; empty if that cannot be read.
    firmware, model : str
        As reported by the kernel; empty if it does not report them.
    software : bool
        Whether a CPU does its work, as for rxe and siw.
    device : PciDevice or None
        The PCI device; None for software NICs, and if it cannot be read.
    ports : tuple of Port
        The ports, in order.
    """

    name: str
    driver: str
    firmware: str
    model: str
    software: bool
    device: PciDevice | None
    ports: tuple[Port, ...]

    @property
    def active(self) -> tuple[Port, ...]:
        """The ports with an active link."""
        return tuple(port for port in self.ports if port.state == "ACTIVE")

    @property
    def is_connectx(self) -> bool:
        """Whether it is a ConnectX, or a function or subfunction of one, that kernels could post to."""
        return not self.software and self.driver.split(".")[0] == IBGDA_DRIVER


def read_nics(files: Files) -> list[Nic]:
    """Return all NICs, in order."""
    return [_read_nic(files, name) for name in files.names(_CLASS)]


def _read_nic(files: Files, name: str) -> Nic:
    folder = f"{_CLASS}/{name}"
    driver = files.resolved(f"{folder}/device/driver").rsplit("/", 1)[-1]
    # Older kernels give an rxe NIC the device of its network interface; only rxe has `parent`, the interface's name.
    software = files.exists(f"{folder}/parent") or "/virtual/" in files.resolved(folder)
    device = None if software else read_device(files, f"{folder}/device")
    ids = f"PCI ID {device.vendor:04x}:{device.device:04x}" if device else ""
    iwarp = (files.text(f"{folder}/node_type") or "").split(":")[0] == str(_IWARP)
    has_driver = not software and files.exists(f"{folder}/device/driver")
    ports = [int(port) for port in files.names(f"{folder}/ports") if port.isdecimal()]
    return Nic(
        name=name,
        driver=driver if has_driver else "",
        firmware=files.text(f"{folder}/fw_ver") or "",
        model=files.text(f"{folder}/hca_type") or files.text(f"{folder}/board_id") or ids,
        software=software,
        device=device,
        ports=tuple(_read_port(files, name, port, iwarp, driver) for port in ports),
    )


def _read_port(files: Files, name: str, number: int, iwarp: bool, driver: str) -> Port:
    folder = f"{_CLASS}/{name}/ports/{number}"
    state, physical = (
        (files.text(f"{folder}/{which}") or "").split(":")[-1].strip() for which in ("state", "phys_state")
    )
    gids = tuple(_read_gids(files, folder))
    interfaces = [gid.interface for gid in gids if gid.interface]
    interfaces += [files.text(f"{_CLASS}/{name}/parent") or "", *files.names(f"{_CLASS}/{name}/device/net")]
    return Port(
        number=number,
        state=state or "unknown state",
        physical_state=physical,
        rate=files.text(f"{folder}/rate") or "unknown rate",
        link=_link(files.text(f"{folder}/link_layer") or "", iwarp, driver),
        gids=gids,
        interface=next(filter(None, interfaces), ""),
        traffic_class=_read_traffic_class(files, name, number),
    )


def _link(layer: str, iwarp: bool, driver: str) -> Link:
    """Return a port's protocol; the kernel reports "Ethernet" for iWARP too, and "Unknown" for other link layers."""
    if iwarp:
        return Link.IWARP
    if driver == "efa":
        return Link.EFA
    return {"InfiniBand": Link.INFINIBAND, "Ethernet": Link.ROCE}.get(layer, Link.OTHER)


def _read_gids(files: Files, folder: str) -> list[Gid]:
    gids = []
    for index in files.names(f"{folder}/gids"):
        value = files.text(f"{folder}/gids/{index}") or ""
        if not index.isdecimal() or value == _NO_GID or not _is_address(value):
            continue
        # These files cannot be read if the entry belongs to no network.
        kind = files.text(f"{folder}/gid_attrs/types/{index}") or ""
        gids.append(Gid(int(index), value, kind, files.text(f"{folder}/gid_attrs/ndevs/{index}") or ""))
    return gids


def _is_address(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True


def _read_traffic_class(files: Files, name: str, port: int) -> int | None:
    """Return the system's traffic class for RoCE.

    NVIDIA's drivers have a file with the line "Global tclass=106", followed by lines for individual flows. The kernel's
    connection manager has a default, if its configuration is mounted.
    """
    text = files.text(f"{_CLASS}/{name}/tc/{port}/traffic_class") or ""
    found = re.search(r"^Global tclass\s*=\s*(0[xX][0-9a-fA-F]+|\d+)\s*$", text, re.MULTILINE)
    if found:
        return int(found[1], 16 if found[1][:2] in ("0x", "0X") else 10)
    return files.number(f"/sys/kernel/config/rdma_cm/{name}/ports/{port}/default_roce_tos") or None
