"""Whether a Buffer's heaps lie in NVSHMEM's symmetric heap."""

from __future__ import annotations

import importlib.util
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deep_ep_py.bootstrap.connections import Connections
from deep_ep_py.bootstrap.groups import Bootstrap
from deep_ep_py.core.environment import FABRIC

if TYPE_CHECKING:
    from deep_ep_py.device.device import Device
    from deep_ep_py.nvshmem.memory import NvshmemMemory

_log = logging.getLogger("deep_ep_py")

NVSHMEM, OWN = "nvshmem", "own"
_NICS = Path("/sys/class/infiniband")
_IBGDA = "NVSHMEM_IB_ENABLE_IBGDA"


def _nics_prefix() -> str:
    """Return how the names of NICs that NVSHMEM uses begin."""
    return os.environ.get("NVSHMEM_HCA_PREFIX") or "mlx5"


def choose_memory(bootstrap: Bootstrap, device: Device, heap: Any, fabric: Any, queues: int) -> NvshmemMemory | None:
    """Return what a Buffer has of NVSHMEM; None: its heaps lie in memory of their own. Collective among its ranks.

    Parameters
    ----------
    bootstrap : Bootstrap
        The ranks, as `connect` has returned them.
    device : Device
        Where this one computes.
    heap, fabric
        As `Buffer` takes them.
    queues
        Queue pairs to each peer.

    Raises
    ------
    TypeError, ValueError
        Naming the argument.
    NvshmemError
        It was asked for and cannot be had.
    """
    if heap not in (None, OWN, NVSHMEM):
        raise ValueError(f"heap={heap!r}: expected {OWN!r} or {NVSHMEM!r}, or None for what suits these ranks")
    context = getattr(device, "context", None)
    if heap == NVSHMEM and context is None:
        raise ValueError(f"heap={NVSHMEM!r}: expected device='cuda', its memory is a GPU's, not {device.torch_device}")
    if not isinstance(bootstrap, Connections):
        machines = [0] * bootstrap.size
    else:
        machines = bootstrap.machines
        if heap is None and len(set(machines)) > 1 and _all_are_able(bootstrap, device, fabric):
            heap = NVSHMEM
    if heap != NVSHMEM:
        return None
    from deep_ep_py.nvshmem.memory import NvshmemMemory

    return NvshmemMemory(bootstrap, machines, context, queues)


def _all_are_able(bootstrap: Bootstrap, device: Device, fabric: Any) -> bool:
    """Tell whether every rank has what it takes: a GPU, nvshmem4py, a ConnectX, and IBGDA enabled."""
    lacks = ""
    if not device.asynchronous:
        lacks = "a GPU"
    elif fabric is not None or os.environ.get(FABRIC):
        lacks = "no fabric named"
    elif os.environ.get(_IBGDA, "0") in ("0", ""):
        lacks = f"{_IBGDA}=1"
    elif importlib.util.find_spec("nvshmem") is None:
        lacks = "nvshmem4py"
    elif not any(nic.name.startswith(_nics_prefix()) for nic in (_NICS.iterdir() if _NICS.is_dir() else ())):
        lacks = "a ConnectX"
    told = bootstrap.all_gather(lacks)
    for rank, missing in enumerate(told):
        if missing:
            _log.debug("rank %d: heaps lie in memory of their own, for rank %d lacks %s", bootstrap.rank, rank, missing)
            return False
    return True
