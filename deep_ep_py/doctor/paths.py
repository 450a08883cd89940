"""The ways that rows can take from this machine."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Iterator, Mapping

import torch

from deep_ep_py.bootstrap.machines import own_address
from deep_ep_py.core.environment import ADDRESS, PROVIDER
from deep_ep_py.core.native import C
from deep_ep_py.doctor.findings import Finding, Section, Verdict


def paths(environment: Mapping[str, str] = os.environ) -> Section:
    """Describe the fabrics that a Buffer can use here, and what is set for them."""
    return Section.of("Paths", _paths(environment))


def _paths(environment: Mapping[str, str]) -> Iterator[Finding]:
    yield _peer()
    yield Finding(
        "ibgda",
        Verdict.INFO,
        "software NICs, on a CPU alone",
        "kernels post on them what a ConnectX would be given; real queue pairs cannot be adopted yet",
    )
    yield _proxy(environment)
    yield _own_address()
    given = {name: value for name, value in sorted(environment.items()) if name.startswith("DEEP_EP_")}
    if given:
        yield Finding("environment", Verdict.INFO, ", ".join(f"{name}={value}" for name, value in given.items()))


def _peer() -> Finding:
    """Ranks of one machine hand each other files in memory, so it takes no more than that call."""
    try:
        os.close(os.memfd_create("deep_ep_py doctor"))
    except OSError as error:
        return Finding(
            "peer", Verdict.ERROR, f"memfd_create fails: {error.strerror}", "ranks of a machine cannot share heaps"
        )
    if torch.cuda.is_available():
        return Finding("peer", Verdict.GOOD, f"loads and stores, on CPUs and {torch.cuda.device_count()} GPUs")
    return Finding("peer", Verdict.GOOD, "loads and stores, on CPUs")


def _proxy(environment: Mapping[str, str]) -> Finding:
    offered = [provider.name for provider in C.libfabric_here().providers]
    asked = environment.get(PROVIDER)
    if asked and asked not in offered:
        return Finding(
            "proxy",
            Verdict.ERROR,
            f"{PROVIDER}={asked}, which is not here",
            f"available: {', '.join(offered) or 'none'}",
            f"unset {PROVIDER}",
        )
    if not offered:
        return Finding("proxy", Verdict.ABSENT, "no libfabric", "ranks of several machines cannot make a Buffer")
    return Finding("proxy", Verdict.GOOD, f"libfabric's {asked or offered[0]}")


def _own_address() -> Finding:
    name = "address for other machines"
    try:
        address = own_address()
    except ValueError as error:
        return Finding(name, Verdict.ERROR, str(error), "", f"unset {ADDRESS}")
    if ipaddress.ip_address(address).is_loopback:
        return Finding(name, Verdict.INFO, address, "no other machine reaches this one there")
    return Finding(name, Verdict.GOOD, address)
