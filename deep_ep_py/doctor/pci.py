"""PCI devices: where they sit, and what they may do."""

from __future__ import annotations

from dataclasses import dataclass

from deep_ep_py.doctor.files import Files

NVIDIA = 0x10DE
_DEVICES = "/sys/bus/pci/devices"
_DISPLAY = 0x03  # class code of VGA and 3D controllers
_CAPABILITIES, _CAPABILITIES_BIT = 0x34, 0x10
_EXPRESS, _DEVICE_CONTROL, _RELAXED_ORDERING = 0x10, 8, 0x10


@dataclass(frozen=True)
class PciDevice:
    """A device.

    Attributes
    ----------
    address : str
        As 0000:17:00.0.
    vendor, kind : int
        Its vendor, and the first byte of its class.
    numa_node : int
        -1 where the machine does not say.
    bridges : tuple of str
        From the root of its tree down to it: addresses of what it hangs on.
    relaxed_ordering : bool or None
        Whether it may let writes overtake each other; None where only root may read that.
    """

    address: str
    vendor: int
    kind: int
    numa_node: int
    bridges: tuple[str, ...]
    relaxed_ordering: bool | None

    def common_bridges(self, other: PciDevice) -> int:
        """Return how many bridges lie above both: the more, the shorter the way between them."""
        count = 0
        for mine, theirs in zip(self.bridges, other.bridges):
            if mine != theirs:
                break
            count += 1
        return count

    def way_to(self, other: PciDevice) -> str:
        """Name the way between two devices, as `nvidia-smi topo -m` does: PIX, PXB, PHB, NODE or SYS."""
        common = self.common_bridges(other)
        if common > 1:  # the first is the host bridge
            beyond = max(len(self.bridges), len(other.bridges)) - common
            return "PIX" if beyond <= 1 else "PXB"
        if common == 1:
            return "PHB"
        return "NODE" if self.numa_node == other.numa_node and self.numa_node >= 0 else "SYS"


def read_device(files: Files, folder: str) -> PciDevice:
    """Read the device whose folder, or a link to it, is given."""
    resolved = files.resolved(folder)
    parts = resolved.split("/")
    above = [part for part in parts[:-1] if part.startswith("pci") or part.count(":") == 2]
    numa = files.number(f"{folder}/numa_node")
    return PciDevice(
        address=parts[-1],
        vendor=files.number(f"{folder}/vendor") or 0,
        kind=(files.number(f"{folder}/class") or 0) >> 16,
        numa_node=-1 if numa is None else numa,
        bridges=tuple(above),
        relaxed_ordering=_relaxed_ordering(files.data(f"{folder}/config")),
    )


def read_gpus(files: Files) -> list[PciDevice]:
    """Return NVIDIA's GPUs, in the order of their addresses."""
    found = [read_device(files, f"{_DEVICES}/{name}") for name in files.names(_DEVICES)]
    return [device for device in found if device.vendor == NVIDIA and device.kind == _DISPLAY]


def _relaxed_ordering(config: bytes) -> bool | None:
    """Follow the list of capabilities (PCI Local Bus Specification 3.0, 6.7) to the Device Control register of PCI
    Express (Base Specification, 7.5.3.4). Without root's rights the kernel gives the first 64 bytes alone.
    """
    if len(config) <= 64 or not config[6] & _CAPABILITIES_BIT:
        return None
    at, seen = config[_CAPABILITIES] & 0xFC, 0
    while 0x40 <= at <= len(config) - 10 and seen < 48:
        if config[at] == _EXPRESS:
            return bool(config[at + _DEVICE_CONTROL] & _RELAXED_ORDERING)
        at, seen = config[at + 1] & 0xFC, seen + 1
    return None
