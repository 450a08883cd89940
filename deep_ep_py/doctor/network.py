"""What the NICs of this machine mean for the library."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

from deep_ep_py.doctor.files import Files
from deep_ep_py.doctor.findings import Finding, Section, Verdict
from deep_ep_py.doctor.nics import Nic, Port, read_nics
from deep_ep_py.doctor.pci import PciDevice, read_gpus

TRAFFIC_CLASS, SERVICE_LEVEL, GID_INDEX = "NVSHMEM_IB_TRAFFIC_CLASS", "NVSHMEM_IB_SL", "NVSHMEM_IB_GID_INDEX"
_IBGDA_DRIVER = "mlx5_core"
_PROXY_DRIVERS = {"efa": "efa", _IBGDA_DRIVER: "verbs;ofi_rxm"}
"""Kernel modules of NICs, and the provider of libfabric that reaches them best."""


def network(files: Files, environment: Mapping[str, str] = os.environ) -> Section:
    """Describe all NICs, what is set for them, and which GPU each is near."""
    return Section.of("RDMA NICs", _network(files, environment))


def _network(files: Files, environment: Mapping[str, str]) -> Iterator[Finding]:
    nics, gpus = read_nics(files), read_gpus(files)
    if not nics:
        yield Finding(
            "NICs",
            Verdict.ABSENT,
            "none",
            "without RDMA, ranks of different machines talk over TCP, by the proxy",
            "",
        )
        return
    for nic in nics:
        yield _nic(nic)
        yield from (_port(nic, port) for port in nic.ports)
        if gpus:
            yield _nearest(nic, gpus)
        yield _relaxed_ordering(nic)
    active = [(nic, port) for nic in nics for port in nic.active]
    yield from _classes(active, environment)
    if any(nic.driver == _IBGDA_DRIVER for nic in nics):
        yield from _settings_of_firmware(nics, active)


def _nic(nic: Nic) -> Finding:
    value = f"{nic.model}, firmware {nic.firmware}, driver {nic.driver or 'unknown'}, PCI {nic.device.address}"
    if nic.driver == _IBGDA_DRIVER:
        return Finding(
            nic.name,
            Verdict.GOOD,
            value,
            "kernels can post on queue pairs of such a NIC themselves (IBGDA); this library does not adopt them yet, "
            "and uses it by the proxy",
        )
    provider = _PROXY_DRIVERS.get(nic.driver)
    by = f"by the proxy, over libfabric's provider {provider!r}" if provider else "by the proxy, if libfabric knows it"
    return Finding(nic.name, Verdict.INFO, value, f"kernels cannot post on this NIC: it is driven {by}")


def _port(nic: Nic, port: Port) -> Finding:
    name = f"{nic.name} port {port.number}"
    value = f"{port.link_layer}, {port.rate}, {port.state}"
    if port.state != "ACTIVE":
        return Finding(
            name, Verdict.WARNING, value, "it has no link", f"ibstat {nic.name}; look at the cable and the switch"
        )
    if port.link_layer != "Ethernet":
        return Finding(name, Verdict.GOOD, value)
    routable = [gid for gid in port.gids if gid.routable]
    if not routable:
        return Finding(
            name,
            Verdict.ERROR,
            f"{value}, no routable GID of RoCEv2",
            "ranks on other subnets cannot be reached, and link-local addresses may not be unique",
            "give its network interface an IP address: ip addr add ADDRESS/PREFIX dev "
            + next((gid.interface for gid in port.gids if gid.interface), "INTERFACE"),
        )
    first = next((gid for gid in routable if "." in gid.address), routable[0])
    of = f" of {first.interface}" if first.interface else ""
    return Finding(name, Verdict.GOOD, f"{value}, RoCEv2 at {first.address}{of} (GID {first.index})")


def _nearest(nic: Nic, gpus: list[PciDevice]) -> Finding:
    ranking = ["PIX", "PXB", "PHB", "NODE", "SYS"]
    best = min(gpus, key=lambda gpu: ranking.index(nic.device.way_to(gpu)))
    way = nic.device.way_to(best)
    near = [gpu.address for gpu in gpus if nic.device.way_to(gpu) == way]
    value = f"{way} to {', '.join(near)}"
    name = f"{nic.name} nearest GPU"
    if way in ("PIX", "PXB"):
        return Finding(name, Verdict.GOOD, value)
    return Finding(
        name,
        Verdict.WARNING if way == "SYS" else Verdict.INFO,
        value,
        "no GPU shares a PCIe switch with it, so its traffic passes a CPU",
    )


def _relaxed_ordering(nic: Nic) -> Finding:
    name = f"{nic.name} relaxed ordering"
    if nic.device.relaxed_ordering is None:
        return Finding(
            name,
            Verdict.INFO,
            "unknown",
            "only root may read it",
            f"sudo lspci -vvs {nic.device.address} | grep RlxdOrd",
        )
    if nic.device.relaxed_ordering:
        return Finding(
            name, Verdict.GOOD, "allowed", "the NIC may reorder writes; signals are atomics, which overtake none"
        )
    return Finding(
        name,
        Verdict.INFO,
        "not allowed",
        "on some platforms this makes writes slower",
        "look at the BIOS's setting of PCIe relaxed ordering",
    )


def _classes(active: list[tuple[Nic, Port]], environment: Mapping[str, str]) -> Iterator[Finding]:
    """NVSHMEM sets its queue pairs up without the kernel's driver, so what the system has does not reach them."""
    given, level = environment.get(TRAFFIC_CLASS), environment.get(SERVICE_LEVEL)
    layers = {port.link_layer for _, port in active}
    of_system = {port.traffic_class for _, port in active if port.traffic_class is not None}
    if "InfiniBand" in layers and given is not None:
        yield Finding(
            "traffic class",
            Verdict.ERROR,
            f"{TRAFFIC_CLASS}={given}",
            "NVSHMEM fails at its start if it is set on InfiniBand, which has service levels",
            f"unset {TRAFFIC_CLASS}",
        )
    elif "Ethernet" in layers:
        yield _traffic_class_of_roce(given, of_system)
    if level is not None:
        yield Finding("service level", Verdict.INFO, f"{SERVICE_LEVEL}={level}")
    elif "InfiniBand" in layers:
        yield Finding("service level", Verdict.GOOD, "0, since none is set")


def _traffic_class_of_roce(given: str | None, of_system: set[int]) -> Finding:
    name = "traffic class"
    here = ", ".join(str(value) for value in sorted(of_system))
    if given is None:
        return Finding(
            name,
            Verdict.WARNING,
            f"{TRAFFIC_CLASS} is not set" + (f"; the system has {here}" if here else ""),
            "NVSHMEM ignores what the system has: packets travel without the class that switches treat as lossless",
            f"export {TRAFFIC_CLASS}={here or 'CLASS'}" + ("" if here else ", with the class of your network"),
        )
    if of_system and given not in {str(value) for value in of_system}:
        return Finding(
            name,
            Verdict.WARNING,
            f"{TRAFFIC_CLASS}={given}, and the system has {here}",
            "packets travel in a class that switches may not treat as lossless",
            f"export {TRAFFIC_CLASS}={here}",
        )
    return Finding(name, Verdict.GOOD, f"{TRAFFIC_CLASS}={given}")


def _settings_of_firmware(nics: list[Nic], active: list[tuple[Nic, Port]]) -> Iterator[Finding]:
    """What the kernel does not tell of ConnectX."""
    devices = [nic.device.address for nic in nics if nic.driver == _IBGDA_DRIVER]
    if any(port.link_layer == "Ethernet" for _, port in active):
        yield Finding(
            "adaptive routing, ECE",
            Verdict.INFO,
            "not readable here",
            "nothing here needs packets to arrive in order, so adaptive routing may be on",
            f"mlxreg -d {devices[0]} --reg_name ROCE_ACCEL --get; mlxconfig -d {devices[0]} query | grep -i ROCE",
        )
        yield Finding(
            "UDP source ports",
            Verdict.INFO,
            "chosen by NVSHMEM",
            "its queue pairs may share one, so that switches that hash by it put them all on one link",
        )
