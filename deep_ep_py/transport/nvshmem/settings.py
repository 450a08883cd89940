"""Settings of the environment that matter before NVSHMEM is loaded."""

from __future__ import annotations

import os
from collections.abc import Mapping

INSTALL = "pip install nvshmem4py-cu13"
ENABLE_IBGDA = "NVSHMEM_IB_ENABLE_IBGDA"
"""The variable that makes NVSHMEM create queue pairs for kernels; it is off by default."""
RELAXED_ORDERING = "NVSHMEM_IB_ENABLE_RELAXED_ORDERING"
"""The variable that lets NICs reorder writes to NVSHMEM's heap; it is on by default."""
DEFAULTS = {
    ENABLE_IBGDA: "1",
    # With it, an atomic, such as a signal, may overtake the rows in front of it (P8).
    RELAXED_ORDERING: "0",
    # Such NICs reach GPU memory by another way, and kernels would have to order their writes by reads.
    "NVSHMEM_DISABLE_DATA_DIRECT": "1",
    # Buffers use neither NVLink between machines, nor multicast memory, nor teams. The first two fail at startup on
    # some systems, such as containers, and each team takes memory.
    "NVSHMEM_DISABLE_MNNVL": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "NVSHMEM_MAX_TEAMS": "7",
}
"""What a Buffer sets before it initializes NVSHMEM, unless the environment says otherwise."""
_ON_BY_DEFAULT = (RELAXED_ORDERING,)


def is_on(environment: Mapping[str, str], name: str) -> bool:
    """Return whether NVSHMEM takes a variable for true: it looks only at the first letter, and "" is true."""
    value = environment.get(name)
    return name in _ON_BY_DEFAULT if value is None else value[:1] not in {*"0NnFf"}


_set_here = set[str]()


def set_default(name: str, value: str) -> None:
    """Set an environment variable for NVSHMEM, which may read it at any time, unless it is already set."""
    if name not in os.environ:
        _set_here.add(name)
        os.environ[name] = value


def take_back() -> None:
    """Remove from the environment what `set_default` has set, because NVSHMEM was not initialized with it."""
    for name in _set_here:
        os.environ.pop(name, None)
    _set_here.clear()


def given_by_user() -> dict[str, str]:
    """Return this process's environment without the variables set by `set_default`."""
    return {name: value for name, value in os.environ.items() if name not in _set_here}


def enables_ibgda(environment: Mapping[str, str]) -> bool:
    """Return whether NVSHMEM is told to make queue pairs for kernels."""
    return is_on(environment, ENABLE_IBGDA)


def refusal_of_order(environment: Mapping[str, str]) -> str:
    """Return why a signal could overtake its rows on NVSHMEM's queue pairs; empty if it cannot."""
    if not is_on(environment, RELAXED_ORDERING):
        return ""
    return (
        "NVSHMEM lets NICs reorder writes, and an atomic may overtake them where it is an atomic operation of PCIe, so "
        f"a signal could be seen before the rows that precede it: set {RELAXED_ORDERING}=0 on every PE before NVSHMEM "
        "is initialized"
    )


def nics_prefix(environment: Mapping[str, str]) -> str:
    """Return the text that the names of the NICs that NVSHMEM uses contain."""
    return environment.get("NVSHMEM_HCA_PREFIX", "mlx5")
