"""The GPUs that are visible to this process: how they reach each other, and how NICs reach them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from deep_ep_py.base.gpus import DRIVER, NVML
from deep_ep_py.device import nvml
from deep_ep_py.tools.doctor.driver import (
    ALL_ORDERING,
    NO_ORDERING,
    OWNER_ORDERING,
    DriverFacts,
    DriverGpu,
    DriverUnavailableError,
    NoGpuError,
    read_driver,
)
from deep_ep_py.tools.doctor.findings import Finding, Section, Verdict, count

_ORDERINGS = {
    NO_ORDERING: "not ordered",
    OWNER_ORDERING: "ordered for the GPU that owns the memory",
    ALL_ORDERING: "ordered for all GPUs",
}


@dataclass(frozen=True)
class Peers:
    """Which GPUs use each other's memory.

    Attributes
    ----------
    source : str
        What reports this: the driver or NVML.
    names : tuple of str
        The GPUs.
    access, atomics : frozenset of (int, int)
        Pairs of indices of GPUs of which the first loads from and stores to the memory of the second, and modifies it
        atomically.
    """

    source: str
    names: tuple[str, ...]
    access: frozenset[tuple[int, int]]
    atomics: frozenset[tuple[int, int]]


def read_nvml() -> Peers:
    """Ask NVML about all GPUs that it shows.

    Raises
    ------
    NvmlError
        It is missing, or does not answer.
    """
    library = nvml.library()
    gpus = [*enumerate(library.gpus())]
    reached = {(i, j): library.reach(one, other) for i, one in gpus for j, other in gpus if i != j}
    access = frozenset(pair for pair, (can, _) in reached.items() if can)
    atomics = frozenset(pair for pair in access if reached[pair][1])
    return Peers(NVML, tuple(f"GPU{index}" for index, _ in gpus), access, atomics)


def visible(
    present: int, read: Callable[[], DriverFacts] = read_driver, read_all: Callable[[], Peers] = read_nvml
) -> Section:
    """Describe what the CUDA driver reports of this process's GPUs, and NVML of all.

    Parameters
    ----------
    present
        Number of GPUs of the machine.
    read, read_all
        Query the driver, and NVML.
    """
    return Section.of("GPUs of this process", _visible(present, read, read_all))


def _visible(present: int, read: Callable[[], DriverFacts], read_all: Callable[[], Peers]) -> Iterator[Finding]:
    try:
        facts = read()
    except NoGpuError as error:
        yield Finding(
            "CUDA driver",
            Verdict.WARNING if present else Verdict.ABSENT,
            str(error),
            f"the machine has {count(present, 'GPU')}: see CUDA_VISIBLE_DEVICES, and docker run --gpus"
            if present
            else "",
        )
        return
    except DriverUnavailableError as error:
        if present:
            yield Finding("CUDA driver", Verdict.ERROR, str(error), "no GPU can be used without it")
        else:
            yield Finding("CUDA driver", Verdict.ABSENT, "not here", str(error))
        return
    yield Finding("CUDA driver", Verdict.GOOD, f"for CUDA up to {facts.version}")
    for number, gpu in enumerate(facts.gpus):
        yield Finding(f"cuda:{number}", Verdict.GOOD, f"{gpu.name}, PCI {gpu.address}")
    if present > len(facts.gpus):
        yield Finding("hidden GPUs", Verdict.INFO, f"{present - len(facts.gpus)} of the machine's {present}")
    if len(facts.gpus) > 1:
        names = tuple(f"cuda:{number}" for number in range(len(facts.gpus)))
        yield from _peers(Peers(DRIVER, names, facts.access, facts.atomics))
    yield from _of_all(present, len(facts.gpus), read_all)
    yield _rdma(facts.gpus)
    yield _ordering(facts.gpus)
    yield _shown(facts.gpus, "dma-buf", lambda gpu: gpu.dma_buf, "NICs access GPU memory by nvidia_peermem instead")
    yield _shown(
        facts.gpus, "handles for other nodes", lambda gpu: gpu.fabric_handles, "GPUs of other nodes cannot be mapped"
    )


def _which(numbers: Sequence[int]) -> str:
    return ", ".join(f"cuda:{number}" for number in numbers)


def _of_all(present: int, seen: int, read_all: Callable[[], Peers]) -> Iterator[Finding]:
    """Describe what a rank is told about GPUs that its process does not see."""
    name = "hidden peers"
    apart = "ranks whose processes do not see each other's GPUs count as unable to use each other's memory"
    try:
        peers = read_all()
    except nvml.NvmlError as error:
        if present > 1:
            verdict = Verdict.WARNING if present > seen else Verdict.INFO
            note = "let each process see all GPUs, or NVML (in containers, NVIDIA_DRIVER_CAPABILITIES has utility)"
            yield Finding(name, verdict, f"NVML cannot be asked: {error}", apart, note)
        return
    if len(peers.names) > seen:
        yield Finding(name, Verdict.GOOD, f"NVML shows {count(len(peers.names), 'GPU')}, and is asked about them")
        yield from _peers(peers)
    elif present > seen:
        note = "let each process see all GPUs, if ranks on the hidden ones should use NVLink"
        yield Finding(name, Verdict.INFO, f"NVML does not show them either, only {len(peers.names)}", apart, note)


def _missing(peers: Peers) -> str:
    """Describe which GPUs do not reach which others, grouped by common targets; empty if all reach all."""
    numbers, by_targets = range(len(peers.names)), dict[tuple[int, ...], list[int]]()
    for one in numbers:
        targets = tuple(other for other in numbers if other != one and (one, other) not in peers.access)
        if targets:
            by_targets.setdefault(targets, []).append(one)

    def which(gpus: Sequence[int]) -> str:
        return ", ".join(peers.names[gpu] for gpu in gpus)

    return "; ".join(f"not from {which(sources)} to {which(targets)}" for targets, sources in by_targets.items())


def _peers(peers: Peers) -> Iterator[Finding]:
    by = "" if peers.source == DRIVER else f", {peers.source}"
    yield _peer_access(f"peer access{by}", peers)
    yield _peer_atomics(f"atomics on peers{by}", peers)


def _peer_access(name: str, peers: Peers) -> Finding:
    missing = _missing(peers)
    if not missing:
        return Finding(name, Verdict.GOOD, "from each GPU to each other")
    return Finding(
        name,
        Verdict.WARNING,
        missing,
        "ranks on these GPUs cannot use each other's memory by loads and stores, and take another path",
        "without NVLink, PCIe access control (ACS) or an IOMMU may be in the way; this shows the links:",
        "nvidia-smi topo -m; nvidia-smi topo -p2p r",
    )


def _peer_atomics(name: str, peers: Peers) -> Finding:
    without = peers.access - peers.atomics
    if not without:
        return Finding(name, Verdict.GOOD, "native" if peers.access else "no peer is reached")
    return Finding(
        name,
        Verdict.WARNING,
        f"not native for {len(without)} of {count(len(peers.access), 'pair')}",
        "signals between ranks that share memory are atomic additions, so ranks on these GPUs take another path",
        "they are native over NVLink; this shows which pairs have them:",
        "nvidia-smi topo -p2p a",
    )


def _shown(gpus: Sequence[DriverGpu], name: str, has: Callable[[DriverGpu], bool], reason: str) -> Finding:
    without = [number for number, gpu in enumerate(gpus) if not has(gpu)]
    if not without:
        return Finding(name, Verdict.GOOD, "supported")
    return Finding(name, Verdict.INFO, f"not supported by {_which(without)}", reason)


def _rdma(gpus: Sequence[DriverGpu]) -> Finding:
    reason = "no NIC can reach their memory; the proxy does not need that, since its rows go through host memory"
    return _shown(gpus, "GPUDirect RDMA", lambda gpu: gpu.rdma, reason)


def _ordering(gpus: Sequence[DriverGpu]) -> Finding:
    """Judge whether the GPUs order a NIC's writes: only then may a kernel that sees its signal read the data."""
    name = "writes of NICs"
    found = dict[int, list[int]]()
    for number, gpu in enumerate(gpus):
        found.setdefault(gpu.ordering, []).append(number)
    texts = {ordering: _ORDERINGS.get(ordering, f"ordered in way {ordering}") for ordering in found}
    value = "; ".join(
        texts[ordering] + ("" if len(found) == 1 else f" on {_which(numbers)}") for ordering, numbers in found.items()
    )
    if NO_ORDERING in found:
        reason = 'kernels cannot wait in memory of these GPUs for writes of a NIC: heap="nvshmem" is refused'
        return Finding(name, Verdict.INFO, value, reason)
    return Finding(name, Verdict.GOOD, value)
