"""The GPUs that are visible to this process: how they reach each other, and how NICs reach them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from deep_ep_py.doctor.driver import (
    ALL_ORDERING,
    NO_ORDERING,
    OWNER_ORDERING,
    DriverFacts,
    DriverGpu,
    DriverUnavailableError,
    NoGpuError,
    read_driver,
)
from deep_ep_py.doctor.findings import Finding, Section, Verdict, count

_ORDERINGS = {
    NO_ORDERING: "not ordered",
    OWNER_ORDERING: "ordered for the GPU that owns the memory",
    ALL_ORDERING: "ordered for all GPUs",
}


def visible(present: int, read: Callable[[], DriverFacts] = read_driver) -> Section:
    """Describe what the CUDA driver reports.

    Parameters
    ----------
    present
        Number of GPUs of the machine.
    read
        Queries the driver.
    """
    return Section.of("GPUs of this process", _visible(present, read))


def _visible(present: int, read: Callable[[], DriverFacts]) -> Iterator[Finding]:
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
        yield _peer_access(facts)
        yield _peer_atomics(facts)
    yield _rdma(facts.gpus)
    yield _ordering(facts.gpus)
    yield _shown(facts.gpus, "dma-buf", lambda gpu: gpu.dma_buf, "NICs access GPU memory by nvidia_peermem instead")
    yield _shown(
        facts.gpus, "handles for other nodes", lambda gpu: gpu.fabric_handles, "GPUs of other nodes cannot be mapped"
    )


def _which(numbers: Sequence[int]) -> str:
    return ", ".join(f"cuda:{number}" for number in numbers)


def _missing(facts: DriverFacts, there: frozenset[tuple[int, int]]) -> str:
    """Describe which GPUs do not reach which others, grouped by common targets; empty if all reach all."""
    numbers, by_targets = range(len(facts.gpus)), dict[tuple[int, ...], list[int]]()
    for one in numbers:
        targets = tuple(other for other in numbers if other != one and (one, other) not in there)
        if targets:
            by_targets.setdefault(targets, []).append(one)
    return "; ".join(f"not from {_which(sources)} to {_which(targets)}" for targets, sources in by_targets.items())


def _peer_access(facts: DriverFacts) -> Finding:
    missing = _missing(facts, facts.access)
    if not missing:
        return Finding("peer access", Verdict.GOOD, "from each GPU to each other")
    return Finding(
        "peer access",
        Verdict.WARNING,
        missing,
        "ranks on these GPUs cannot use each other's memory by loads and stores, and take another path",
        "without NVLink, PCIe access control (ACS) or an IOMMU may be in the way; this shows the links:",
        "nvidia-smi topo -m; nvidia-smi topo -p2p r",
    )


def _peer_atomics(facts: DriverFacts) -> Finding:
    without = facts.access - facts.atomics
    if not without:
        return Finding("atomics on peers", Verdict.GOOD, "native" if facts.access else "no peer is reached")
    return Finding(
        "atomics on peers",
        Verdict.WARNING,
        f"not native for {len(without)} of {count(len(facts.access), 'pair')}",
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
