"""The paths that rows can take from this machine."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator

import torch

from deep_ep_py.base.environment import PROVIDER
from deep_ep_py.base.machine_files import Files
from deep_ep_py.base.native import C
from deep_ep_py.tools.doctor.findings import Finding, Section, Verdict, count
from deep_ep_py.tools.doctor.posting import posting
from deep_ep_py.tools.doctor.software import has_nvshmem4py
from deep_ep_py.tools.doctor.variables import NEAR_PROVIDER
from deep_ep_py.transport.bootstrap.machines import own_address


def paths(files: Files) -> Section:
    """Describe the fabrics that a Buffer can use here.

    Parameters
    ----------
    files
        The files of this machine.
    """
    return Section.of("Paths", _paths(files))


def _paths(files: Files) -> Iterator[Finding]:
    yield _peer()
    yield from posting(files, os.environ, has_nvshmem4py())
    yield _proxy()
    yield _own_address()


def _peer() -> Finding:
    """Describe the path within a machine: ranks share memory files, so only making one must work."""
    try:
        C.Heap.make_shared(mmap.PAGESIZE)
    except (OSError, RuntimeError) as error:
        return Finding("peer", Verdict.ERROR, str(error), "ranks of a machine cannot share heaps")
    if torch.cuda.is_available():
        return Finding("peer", Verdict.GOOD, f"loads and stores, on CPUs and {count(torch.cuda.device_count(), 'GPU')}")
    return Finding("peer", Verdict.GOOD, "loads and stores, on CPUs")


def _proxy() -> Finding:
    name, offered = "proxy", [provider.name for provider in C.libfabric_here().providers]
    if not offered:
        return Finding(name, Verdict.ABSENT, "no libfabric", "ranks of several machines cannot make a Buffer")
    asked = os.environ.get(PROVIDER)
    if asked and asked not in offered:  # reported as an error of the environment
        return Finding(name, Verdict.INFO, f"none, by {PROVIDER}", "a Buffer that needs it cannot be made")
    far = [provider for provider in offered if provider != NEAR_PROVIDER]
    if asked == NEAR_PROVIDER or not far:
        return Finding(
            name,
            Verdict.WARNING,
            f"libfabric's {NEAR_PROVIDER}, only on this machine",
            "ranks of several machines cannot make a Buffer",
        )
    return Finding(name, Verdict.GOOD, f"libfabric's {asked or far[0]}")


def _own_address() -> Finding:
    name = "address for other machines"
    try:
        address = own_address()
    except ValueError as error:
        return Finding(name, Verdict.INFO, "none", f"no Buffer for ranks of several machines can be made: {error}")
    return Finding(name, Verdict.GOOD, address)
