"""RDMA NICs, as the kernel describes them below /sys/class/infiniband."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from deep_ep_py.doctor.files import Files
from deep_ep_py.doctor.pci import PciDevice, read_device

_CLASS = "/sys/class/infiniband"
_NO_GID = "0000:0000:0000:0000:0000:0000:0000:0000"


@dataclass(frozen=True)
class Gid:
    """An address of a port.

    Attributes
    ----------
    index : int
        As NVSHMEM_IB_GID_INDEX takes it.
    value : str
        128 bits as IPv6 writes them.
    kind : str
        As the kernel names it: "IB/RoCE v1" or "RoCE v2".
    interface : str
        Of the network it belongs to; empty where there is none.
    """

    index: int
    value: str
    kind: str
    interface: str

    @property
    def routable(self) -> bool:
        """Whether it is RoCEv2's, and its packets may pass routers."""
        return self.kind == "RoCE v2" and not ipaddress.IPv6Address(self.value).is_link_local

    @property
    def address(self) -> str:
        """The address as people write it."""
        address = ipaddress.IPv6Address(self.value)
        return str(address.ipv4_mapped or address)


@dataclass(frozen=True)
class Port:
    """A port of a NIC.

    Attributes
    ----------
    number : int
        From 1.
    state : str
        As "ACTIVE".
    rate : str
        As the kernel writes it.
    link_layer : str
        "InfiniBand", "Ethernet" (RoCE), or "Unspecified" (EFA).
    gids : tuple of Gid
        Those that are set.
    traffic_class : int or None
        What the system gives to RoCE; None where it is not set, or cannot be read.
    """

    number: int
    state: str
    rate: str
    link_layer: str
    gids: tuple[Gid, ...]
    traffic_class: int | None


@dataclass(frozen=True)
class Nic:
    """A NIC.

    Attributes
    ----------
    name : str
        As "mlx5_0".
    driver : str
        Its kernel module, as "mlx5_core" or "efa"; empty where that cannot be read.
    firmware, model : str
        As the kernel writes them.
    device : PciDevice
        Where it sits.
    ports : tuple of Port
        In order.
    """

    name: str
    driver: str
    firmware: str
    model: str
    device: PciDevice
    ports: tuple[Port, ...]

    @property
    def active(self) -> tuple[Port, ...]:
        """Ports with a link."""
        return tuple(port for port in self.ports if port.state == "ACTIVE")


def read_nics(files: Files) -> list[Nic]:
    """Return all, in order."""
    return [_read_nic(files, name) for name in files.names(_CLASS)]


def _read_nic(files: Files, name: str) -> Nic:
    folder = f"{_CLASS}/{name}"
    ports = files.names(f"{folder}/ports")
    has_driver = files.exists(f"{folder}/device/driver")
    return Nic(
        name=name,
        driver=files.resolved(f"{folder}/device/driver").rsplit("/", 1)[-1] if has_driver else "",
        firmware=files.text(f"{folder}/fw_ver") or "unknown",
        model=files.text(f"{folder}/hca_type") or files.text(f"{folder}/board_id") or "unknown",
        device=read_device(files, f"{folder}/device"),
        ports=tuple(_read_port(files, name, int(port)) for port in ports if port.isdecimal()),
    )


def _read_port(files: Files, name: str, number: int) -> Port:
    folder = f"{_CLASS}/{name}/ports/{number}"
    rate = files.text(f"{folder}/rate") or "unknown"
    state = files.text(f"{folder}/state") or "unknown"
    return Port(
        number=number,
        state=state.split(":")[-1].strip(),
        rate=rate,
        link_layer=files.text(f"{folder}/link_layer") or "unknown",
        gids=tuple(_read_gids(files, folder)),
        traffic_class=_read_traffic_class(files, name, number),
    )


def _read_gids(files: Files, folder: str) -> list[Gid]:
    gids = []
    for index in files.names(f"{folder}/gids"):
        value = files.text(f"{folder}/gids/{index}") or ""
        if not index.isdecimal() or value == _NO_GID or not _is_address(value):
            continue
        # These files cannot be read where the entry is of no network.
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
    """NVIDIA's drivers have a file that says "Global tclass=106"; the kernel's connection manager has a default, where
    its configuration is mounted.
    """
    found = re.search(r"tclass\s*=\s*(\d+)", files.text(f"{_CLASS}/{name}/tc/{port}/traffic_class") or "")
    if found:
        return int(found[1])
    return files.number(f"/sys/kernel/config/rdma_cm/{name}/ports/{port}/default_roce_tos") or None
