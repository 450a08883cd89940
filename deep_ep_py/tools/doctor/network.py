"""The RDMA NICs of this machine: their kind, their settings, and the GPU that each is near."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from shlex import quote

from deep_ep_py.base.machine_files import Files
from deep_ep_py.tools.doctor.findings import Finding, Section, Verdict
from deep_ep_py.tools.doctor.nics import Link, Nic, Port, read_nics
from deep_ep_py.tools.doctor.nvshmem import Process, settings
from deep_ep_py.tools.doctor.pci import PciDevice, RelaxedOrdering, read_gpus
from deep_ep_py.transport.nvshmem.settings import RELAXED_ORDERING

_WAYS = ("PIX", "PXB", "PHB", "NODE", "SYS")
"""Connections from the closest to the farthest, as in `nvidia-smi topo -m`."""
_SHARED_SWITCH = _WAYS[:2]


def network(files: Files, process: Process | None) -> Section:
    """Describe all NICs, their settings, and the GPU that each is near.

    Parameters
    ----------
    files
        The files of the machine.
    process
        This process; None if the files belong to another machine.
    """
    return Section.of("RDMA NICs", _network(files, process))


def _network(files: Files, process: Process | None) -> Iterator[Finding]:
    nics, gpus = read_nics(files), read_gpus(files)
    if not nics:
        reason = "without RDMA, ranks of different machines communicate over TCP, by the proxy"
        yield Finding("NICs", Verdict.ABSENT, "none", reason)
        return
    for nic in nics:
        yield _nic(nic)
        yield from (_port(nic, port) for port in nic.ports)
        if nic.device and gpus:
            yield _nearest(nic.name, nic.device, gpus, nics)
        if nic.device:
            yield _relaxed_ordering(nic.name, nic.device)
    connectx = [nic for nic in nics if nic.is_connectx]
    if connectx:
        yield Finding(
            "posting by kernels (IBGDA)",
            Verdict.INFO,
            f"possible on {', '.join(nic.name for nic in connectx)}",
            'from GPUs, with heap="nvshmem"; otherwise the proxy drives them, over libfabric\'s verbs;ofi_rxm',
        )
        yield from settings(connectx, process)
        yield from _settings_of_firmware(connectx)


def _nic(nic: Nic) -> Finding:
    facts = [
        nic.model,
        f"firmware {nic.firmware}" if nic.firmware else "",
        f"driver {nic.driver}" if nic.driver else "",
    ]
    if nic.device:
        kind = "virtual function" if nic.device.virtual_function else "PCI"
        facts.append(f"{kind} {nic.device.address}")
    value = ", ".join(filter(None, facts)) or "of an unknown kind"
    if nic.software:
        value = "software" + (f", on {nic.ports[0].interface}" if nic.ports and nic.ports[0].interface else "")
        return Finding(nic.name, Verdict.INFO, value, "a CPU does its work; it is for tests, and no faster than TCP")
    if any(port.link is Link.IWARP for port in nic.ports):
        reason = "iWARP has no writes with immediate data, which the proxy needs: it uses TCP on this NIC's interface"
        return Finding(nic.name, Verdict.INFO, value, reason)
    if nic.is_connectx:
        return Finding(nic.name, Verdict.GOOD, value)
    by = "provider efa" if nic.driver == "efa" else "provider verbs;ofi_rxm, if that supports it"
    reason = f"kernels cannot post on this NIC: the proxy drives it, over libfabric's {by}"
    return Finding(nic.name, Verdict.INFO, value, reason)


def _port(nic: Nic, port: Port) -> Finding:
    name = f"{nic.name} port {port.number}"
    value = f"{port.link.value}, {port.rate}, {port.state}"
    if nic.software:
        return Finding(name, Verdict.INFO, value)
    if port.state != "ACTIVE":
        return _inactive(nic, port, name, value)
    if port.link is Link.ROCE:
        return _roce(port, name, value)
    return Finding(name, Verdict.INFO if port.link in (Link.IWARP, Link.OTHER) else Verdict.GOOD, value)


def _inactive(nic: Nic, port: Port, name: str, value: str) -> Finding:
    if port.physical_state:
        value += f" ({port.physical_state})"
    if port.link is Link.INFINIBAND and (port.physical_state == "LinkUp" or port.state in ("INIT", "ARMED")):
        return Finding(
            name,
            Verdict.WARNING,
            value,
            "its link is up, but no subnet manager has activated it",
            "start a subnet manager on a switch or on one host of this network; this looks for one:",
            f"sudo sminfo -C {quote(nic.name)} -P {port.number}",
        )
    if port.link is Link.ROCE and port.physical_state == "Disabled" and port.interface:
        return Finding(
            name,
            Verdict.WARNING,
            value,
            "its interface is down",
            "bring it up:",
            f"sudo ip link set {quote(port.interface)} up",
        )
    return Finding(
        name,
        Verdict.WARNING,
        value,
        "it has no link",
        "check the cable and the port of the switch; this shows what the NIC sees:",
        f"ibstat {quote(nic.name)} {port.number}",
    )


def _roce(port: Port, name: str, value: str) -> Finding:
    if port.traffic_class is not None:
        value += f", traffic class {port.traffic_class} by the system"
    routable = [gid for gid in port.gids if gid.routable]
    if routable:
        first = next((gid for gid in routable if "." in gid.address), routable[0])
        of = f" of {first.interface}" if first.interface else ""
        return Finding(name, Verdict.GOOD, f"{value}, RoCEv2 at {first.address}{of} (GID {first.index})")
    has = "only link-local RoCEv2 GIDs" if any(gid.is_version_2 for gid in port.gids) else "no RoCEv2 GID"
    return Finding(
        name,
        Verdict.WARNING,
        f"{value}, {has}",
        "ranks on other subnets cannot be reached by RoCEv2",
        "give its network interface an IP address:",
        f"sudo ip addr add ADDRESS/PREFIX dev {quote(port.interface or 'INTERFACE')}",
    )


def _shortest(device: PciDevice, gpus: Sequence[PciDevice]) -> str:
    return min((device.way_to(gpu) for gpu in gpus), key=_WAYS.index)


def _nearest(name: str, device: PciDevice, gpus: list[PciDevice], nics: list[Nic]) -> Finding:
    way = _shortest(device, gpus)
    value = f"{way} to {', '.join(gpu.address for gpu in gpus if device.way_to(gpu) == way)}"
    name = f"{name} nearest GPU"
    if way in _SHARED_SWITCH:
        return Finding(name, Verdict.GOOD, value)
    if way != "SYS":
        return Finding(name, Verdict.INFO, value, "no GPU shares a PCIe switch with it, so its traffic passes a CPU")
    nearer = [nic.name for nic in nics if nic.device and _shortest(nic.device, gpus) != "SYS"]
    if not nearer:  # as in a virtual machine, which hides the PCIe topology
        return Finding(name, Verdict.INFO, value, "the machine does not report any NIC as near a GPU")
    reason = f"it is attached to another CPU than all GPUs; these are nearer to one: {', '.join(nearer)}"
    return Finding(name, Verdict.WARNING, value, reason)


def _relaxed_ordering(name: str, device: PciDevice) -> Finding:
    name, ordering = f"{name} relaxed ordering", device.relaxed_ordering
    if ordering is RelaxedOrdering.ALLOWED:
        reason = f"for memory whose owner permits it, as NVSHMEM does unless {RELAXED_ORDERING}=0; see PCI_WR_ORDERING"
        return Finding(name, Verdict.INFO, "allowed", reason)
    if ordering is RelaxedOrdering.FORBIDDEN:
        return Finding(name, Verdict.INFO, "not allowed")
    if ordering is RelaxedOrdering.OF_PHYSICAL_FUNCTION:
        reason = "this is a virtual function; the host's setting of the physical function decides"
        return Finding(name, Verdict.INFO, "not readable here", reason)
    return Finding(
        name,
        Verdict.INFO,
        "not readable",
        "only root may read it",
        "this shows RlxdOrd+ if it is allowed:",
        f"sudo lspci -vvs {device.address} | grep RlxdOrd",
    )


def _settings_of_firmware(connectx: Sequence[Nic]) -> Iterator[Finding]:
    """Yield findings for settings of ConnectX that the kernel does not report."""
    used = [nic for nic in connectx if nic.device and not nic.device.virtual_function]
    if any(port.link is Link.INFINIBAND for nic in used for port in nic.active):
        yield Finding(
            "adaptive routing (InfiniBand)",
            Verdict.INFO,
            "not readable here",
            "the subnet manager sets it, by service level; nothing here needs packets to arrive in order",
        )
    if addresses := " ".join(nic.device.address for nic in used if nic.device):
        yield Finding(
            "PCI_WR_ORDERING",
            Verdict.INFO,
            "not readable here",
            "with force_relax, the NIC relaxes the order of writes to all memory, so that signals may overtake rows",
            "NVIDIA's firmware tools show whether it is per_mkey(0), as it should be:",
            f"for nic in {addresses}; do sudo mlxconfig -d $nic query PCI_WR_ORDERING; done",
        )
    roce = [nic.device for nic in used if nic.device and any(port.link is Link.ROCE for port in nic.active)]
    if roce:
        addresses = " ".join(device.address for device in roce)
        yield Finding(
            "adaptive routing, ECE (RoCE)",
            Verdict.INFO,
            "not readable here",
            "nothing here needs packets to arrive in order, so adaptive routing may be on",
            "NVIDIA's firmware tools show it:",
            f"for nic in {addresses}; do sudo mlxreg -d $nic --reg_name ROCE_ACCEL --get; done",
        )
