"""PCI devices: their position and settings."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass

from deep_ep_py.base.machine_files import Files

NVIDIA, MELLANOX = 0x10DE, 0x15B3
_DEVICES = "/sys/bus/pci/devices"
_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_DISPLAY = 0x03  # class code of VGA and 3D controllers
_CAPABILITIES, _CAPABILITIES_BIT = 0x34, 0x10
_EXPRESS, _DEVICE_CONTROL, _RELAXED_ORDERING = 0x10, 8, 0x10
_UNPRIVILEGED_BYTES = 64
"""Size of the part of the configuration space that the kernel shows to users other than root."""
_VIRTUAL_FUNCTIONS = {0x1012, 0x1014, 0x1016, 0x1018, 0x101A, 0x101C, 0x101E, 0xA2D3}
"""Device IDs of Mellanox's virtual functions; in a virtual machine, only these distinguish them from physical ones."""


class RelaxedOrdering(enum.Enum):
    """Whether a device may reorder its writes, or why that is unknown."""

    ALLOWED = enum.auto()
    FORBIDDEN = enum.auto()
    NOT_READABLE = enum.auto()
    """Only root may read it."""
    OF_PHYSICAL_FUNCTION = enum.auto()
    """The register of a virtual function is meaningless, and that of its physical function is not visible."""


@dataclass(frozen=True)
class PciDevice:
    """A PCI device.

    Attributes
    ----------
    address : str
        The address, for example 0000:17:00.0.
    vendor, device : int
        The PCI IDs.
    kind : int
        The first byte of its class.
    numa_node : int
        The NUMA node; -1 if the machine does not report it.
    bridges : tuple of str
        Addresses of the bridges from the root of its tree down to it.
    virtual_function : bool
        Whether it is a virtual function (SR-IOV) of another device.
    relaxed_ordering : RelaxedOrdering
        The setting in its registers.
    """

    address: str
    vendor: int
    device: int
    kind: int
    numa_node: int
    bridges: tuple[str, ...]
    virtual_function: bool
    relaxed_ordering: RelaxedOrdering

    def common_bridges(self, other: PciDevice) -> int:
        """Return the number of bridges above both devices: the more, the shorter the path between them."""
        count = 0
        for mine, theirs in zip(self.bridges, other.bridges):
            if mine != theirs:
                break
            count += 1
        return count

    def way_to(self, other: PciDevice) -> str:
        """Return the connection between two devices as in `nvidia-smi topo -m`: PIX, PXB, PHB, NODE or SYS."""
        common = self.common_bridges(other)
        if common > 1:  # the first is the host bridge
            beyond = max(len(self.bridges), len(other.bridges)) - common
            return "PIX" if beyond <= 1 else "PXB"
        if common == 1:
            return "PHB"
        return "NODE" if self.numa_node == other.numa_node and self.numa_node >= 0 else "SYS"


def read_device(files: Files, folder: str) -> PciDevice | None:
    """Read a device, given its folder, the folder of something on it, or a link to either; None if there is none."""
    parts = files.resolved(folder).split("/")
    places = [place for place, part in enumerate(parts) if _ADDRESS.fullmatch(part)]
    if not places:
        return None
    *above, address = parts[: places[-1] + 1]
    folder = "/".join([*above, address])
    vendor, device = (files.number(f"{folder}/{name}") or 0 for name in ("vendor", "device"))
    numa = files.number(f"{folder}/numa_node")
    has_parent = files.exists(f"{folder}/physfn")
    virtual = has_parent or (vendor == MELLANOX and device in _VIRTUAL_FUNCTIONS)
    ordering = RelaxedOrdering.OF_PHYSICAL_FUNCTION
    if has_parent or not virtual:
        ordering = _relaxed_ordering(files.data(f"{folder}/physfn/config" if has_parent else f"{folder}/config"))
    return PciDevice(
        address=address,
        vendor=vendor,
        device=device,
        kind=(files.number(f"{folder}/class") or 0) >> 16,
        numa_node=-1 if numa is None else numa,
        bridges=tuple(part for part in above if part.startswith("pci") or _ADDRESS.fullmatch(part)),
        virtual_function=virtual,
        relaxed_ordering=ordering,
    )


def read_gpus(files: Files) -> list[PciDevice]:
    """Return NVIDIA's GPUs, in the order of their addresses."""
    found = [read_device(files, f"{_DEVICES}/{name}") for name in files.names(_DEVICES)]
    return [device for device in found if device and device.vendor == NVIDIA and device.kind == _DISPLAY]


def _relaxed_ordering(config: bytes) -> RelaxedOrdering:
    """Return the setting of relaxed ordering.

    It follows the list of capabilities (PCI Local Bus Specification 3.0, 6.7) to the Device Control register of PCI
    Express (Base Specification, 7.5.3.4).
    """
    if len(config) <= _UNPRIVILEGED_BYTES or not config[6] & _CAPABILITIES_BIT:
        return RelaxedOrdering.NOT_READABLE
    at, seen = config[_CAPABILITIES] & 0xFC, 0
    while 0x40 <= at <= len(config) - 10 and seen < 48:
        if config[at] == _EXPRESS:
            allowed = config[at + _DEVICE_CONTROL] & _RELAXED_ORDERING
            return RelaxedOrdering.ALLOWED if allowed else RelaxedOrdering.FORBIDDEN
        at, seen = config[at + 1] & 0xFC, seen + 1
    return RelaxedOrdering.NOT_READABLE
