"""The decision whether a Buffer's heaps are in NVSHMEM's symmetric heap."""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deep_ep_py.base import arguments
from deep_ep_py.base.environment import FABRIC
from deep_ep_py.transport.bootstrap.connections import Connections
from deep_ep_py.transport.bootstrap.groups import Bootstrap
from deep_ep_py.transport.nvshmem.settings import ENABLE_IBGDA, enables_ibgda, given_by_user, nics_prefix

if TYPE_CHECKING:
    from deep_ep_py.device.device import Device
    from deep_ep_py.transport.nvshmem.memory import NvshmemMemory
    from deep_ep_py.transport.topology.gpus import Apart

_log = logging.getLogger("deep_ep_py")

NVSHMEM, OWN = "nvshmem", "own"
_NICS = Path("/sys/class/infiniband")


def choose_memory(
    bootstrap: Bootstrap, device: Device, apart: Apart, heap: Any, fabric: Any, queues: int, masks_ranks: bool
) -> NvshmemMemory | None:
    """Return a Buffer's NVSHMEM memory, or None if its heaps are in memory of their own. Collective among its ranks.

    Parameters
    ----------
    bootstrap : Bootstrap
        The ranks, as returned by `connect`.
    device : Device
        The device of this rank.
    apart : Apart
        Ranks whose GPUs do not use each other's memory.
    heap, fabric
        As in `Buffer`.
    queues
        Queue pairs to each peer.
    masks_ranks
        `enable_shrink` of `Buffer`.

    Raises
    ------
    ValueError
        An argument is invalid on some rank, which the message names, or ranks disagree about `heap`. Raised on all
        ranks.
    NvshmemError
        NVSHMEM was asked for and cannot be used. Where it was not asked for, this is a warning on all ranks.
    """
    refused = _refusal(device, heap, masks_ranks)
    machines = bootstrap.machines if isinstance(bootstrap, Connections) else [0] * bootstrap.size
    asks = heap is None and len(set(machines)) > 1
    lacking = _lacking(device, apart, fabric, masks_ranks) if asks else ""
    job = _job(bootstrap.size) if asks and not lacking else ""
    mine: list[Any] = [refused, None if refused else heap, lacking, job, queues]
    told = [mine] * bootstrap.size if bootstrap.in_process else bootstrap.all_gather(mine)
    for rank, (why, *_) in enumerate(told):
        if why:
            raise ValueError(refused or f"rank {rank}: {why}")
    arguments.same_on_all_ranks(bootstrap.rank, [{"heap": theirs} for _, theirs, *_ in told])
    if heap == OWN or (heap is None and not (asks and _all_are_able(bootstrap.rank, told))):
        return None
    if heap is None:  # otherwise `join` refuses them
        arguments.same_on_all_ranks(bootstrap.rank, [{"num_qps_per_rank": theirs} for *_, theirs in told])
    from deep_ep_py.transport.nvshmem.memory import NvshmemMemory
    from deep_ep_py.transport.nvshmem.together import on_all

    try:
        memory = NvshmemMemory(bootstrap, machines, getattr(device, "context", None), queues)
        if heap is None:
            on_all(bootstrap, memory.check_far_ranks)
    except Exception as error:  # on all ranks alike
        if heap == NVSHMEM:
            raise
        _log.warning(
            "rank %d: heaps are in memory of their own, and the proxy sends to other machines, which is slower: "
            "NVSHMEM's queue pairs cannot be used (%s)",
            bootstrap.rank,
            error,
        )
        return None
    return memory


def _refusal(device: Device, heap: Any, masks_ranks: bool) -> str:
    """Return what is wrong with this rank's arguments; empty if nothing is."""
    if heap not in (None, OWN, NVSHMEM):
        shown = arguments.describe(heap)
        return f"heap={shown}: expected {OWN!r} or {NVSHMEM!r}, or None to choose what suits these ranks"
    if heap == NVSHMEM and getattr(device, "context", None) is None:
        return f"heap={NVSHMEM!r}: expected device='cuda', because its memory is GPU memory, not {device.torch_device}"
    if heap == NVSHMEM and masks_ranks:
        return (
            "enable_shrink=True: expected heap='own' with it, because NVSHMEM's queue pairs to a masked rank cannot be "
            "closed, so requests in flight may still arrive there"
        )
    return ""


def _lacking(device: Device, apart: Apart, fabric: Any, masks_ranks: bool) -> str:
    """Return what this rank lacks for NVSHMEM, such as a GPU, nvshmem4py, a ConnectX or IBGDA; empty if nothing."""
    if not device.asynchronous:
        return "a GPU"
    if masks_ranks:
        return "enable_shrink=False"
    if apart.without_access:
        return "access between all GPUs of a machine"
    if fabric is not None or os.environ.get(FABRIC):
        return "no fabric named"
    environment = given_by_user()
    if not enables_ibgda(environment):
        return f"{ENABLE_IBGDA}=1"
    if importlib.util.find_spec("nvshmem") is None:
        return "nvshmem4py"
    prefix = nics_prefix(environment)
    if not any(prefix in nic.name for nic in (_NICS.iterdir() if _NICS.is_dir() else ())):
        return "a ConnectX"
    if not getattr(device, "context").orders_nic_writes:  # noqa: B009
        return "a GPU that orders a NIC's writes"
    return ""


def _job(ranks: int) -> str:
    """Name the NVSHMEM job of this rank's process: the same on all ranks if they are exactly the PEs of that job."""
    from deep_ep_py.transport.nvshmem.library import NAME, NvshmemError, library
    from deep_ep_py.transport.nvshmem.pool import pool

    try:
        ctypes.CDLL(NAME, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        loaded = library()
    except (OSError, NvshmemError):  # not loaded, or unusable, which a Buffer will report
        return "none"
    if loaded.status() == 0:
        return "none"
    return f"{pool().job or 'the program'}, PE {loaded.pe()}" if loaded.pes() != ranks else pool().job or "the program"


def _all_are_able(own: int, told: Sequence[Sequence[Any]]) -> bool:
    for rank, (_, _, missing, *_) in enumerate(told):
        if missing:
            _log.debug("rank %d: heaps are in memory of their own: rank %d lacks %s", own, rank, missing)
            return False
    if len({job for *_, job, _ in told}) > 1:
        _log.warning("rank %d: heaps are in memory of their own: NVSHMEM's PEs are not exactly these ranks", own)
        return False
    return True
