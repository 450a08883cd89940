"""The prerequisites for GPU kernels to post to this machine's NICs, with `Buffer(heap="nvshmem")`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from deep_ep_py.base.machine_files import Files
from deep_ep_py.tools.doctor.driver import NO_ORDERING, DriverFacts, DriverUnavailableError, read_driver
from deep_ep_py.tools.doctor.findings import Finding, Verdict, count
from deep_ep_py.tools.doctor.gpus import connectx_to_memory, doorbells
from deep_ep_py.tools.doctor.nics import Nic, read_nics
from deep_ep_py.tools.doctor.pci import read_gpus
from deep_ep_py.transport.nvshmem.settings import ENABLE_IBGDA, INSTALL, enables_ibgda

NAME = "ibgda"
_HEAP = 'heap="nvshmem"'


def posting(
    files: Files,
    environment: Mapping[str, str],
    has_nvshmem4py: bool,
    read: Callable[[], DriverFacts] = read_driver,
) -> Iterator[Finding]:
    """Describe whether kernels can post to NICs and, for each missing prerequisite, what to do about it.

    Parameters
    ----------
    files
        The files of the machine.
    environment
        The environment of this process.
    has_nvshmem4py
        Whether nvshmem4py is installed for this Python.
    read
        Queries the driver.
    """
    if not read_gpus(files):
        yield Finding(
            NAME,
            Verdict.INFO,
            "software NICs, only on a CPU",
            f"kernels post to them as to a ConnectX; they post to a real one from a GPU, with {_HEAP}",
        )
        return
    nics = [nic for nic in read_nics(files) if nic.is_connectx and nic.active]
    # A user who has set the variable wants it; otherwise nothing is wrong.
    wanted = enables_ibgda(environment)
    missing = list(_missing(files, nics, environment, has_nvshmem4py, read))
    names = ", ".join(nic.name for nic in nics)
    if missing:
        verdict, value = Verdict.WARNING if wanted else Verdict.INFO, f"{count(len(missing), 'prerequisite')} missing"
    else:
        verdict, value = Verdict.GOOD, f"{names}, by queue pairs of NVSHMEM"
    yield Finding(NAME, verdict, value, f"for a Buffer with {_HEAP}; not yet run on a GPU or a NIC")
    yield from (replace(one, verdict=verdict) for one in missing)
    if not environment.get(ENABLE_IBGDA):
        yield Finding(
            f"{NAME} by default",
            Verdict.INFO,
            f"{ENABLE_IBGDA} is not set",
            f"ranks of several machines use NVSHMEM's queue pairs only if a Buffer has {_HEAP}",
            "to use them in all Buffers of such ranks, on all machines:",
            f"export {ENABLE_IBGDA}=1",
        )


def _missing(
    files: Files,
    nics: list[Nic],
    environment: Mapping[str, str],
    has_nvshmem4py: bool,
    read: Callable[[], DriverFacts],
) -> Iterator[Finding]:
    def lacks(what: str, value: str, reason: str, note: str, command: str) -> Finding:
        return Finding(f"{NAME} needs {what}", Verdict.INFO, value, reason, note, command)

    if not nics:
        reason = "kernels can post only to a ConnectX; the proxy drives other NICs"
        note = "this shows whether there is one, and which driver it uses:"
        yield lacks("a ConnectX", "none with a link", reason, note, "lspci -d 15b3: -k")
    if not has_nvshmem4py:
        reason = "it makes the queue pairs and the heap"
        yield lacks("nvshmem4py", "not installed", reason, "install it, for CUDA 13:", INSTALL)
    if (given := environment.get(ENABLE_IBGDA)) and not enables_ibgda(environment):
        reason = "NVSHMEM then makes no queue pairs that kernels post to"
        yield lacks("IBGDA", f"{ENABLE_IBGDA}={given}", reason, "set it, on all machines:", f"export {ENABLE_IBGDA}=1")
    for what, found in (("doorbells", doorbells(files, True)), ("GPU memory", connectx_to_memory(files))):
        if found.verdict is not Verdict.GOOD:
            yield replace(found, name=f"{NAME} needs {what}")
    try:
        gpus = read().gpus
    except DriverUnavailableError:
        return
    unordered = [f"cuda:{number}" for number, gpu in enumerate(gpus) if gpu.ordering == NO_ORDERING]
    if unordered:
        yield lacks(
            "ordered writes",
            f"not ordered on {', '.join(unordered)}",
            "a kernel there may see a NIC's signal before the rows that precede it",
            "such machines use the proxy by default; then this should not be set:",
            f"unset {ENABLE_IBGDA}",
        )
