"""What is asked of a machine and of the environment before NVSHMEM is loaded."""

from __future__ import annotations

import os
from collections.abc import Mapping

INSTALL = "pip install nvshmem4py-cu13"
ENABLE_IBGDA = "NVSHMEM_IB_ENABLE_IBGDA"
"""The variable that has NVSHMEM make queue pairs for kernels; it is off by default."""
_NO = ("", "0", "f", "false", "n", "no", "off")


def is_on(environment: Mapping[str, str], name: str) -> bool:
    """Tell whether a variable of NVSHMEM's is set, and to something else than no."""
    return environment.get(name, "").lower() not in _NO


_set_here = set[str]()


def set_default(name: str, value: str) -> None:
    """Set a variable of this process for NVSHMEM, which reads it whenever it comes to need it, unless it is set."""
    if name not in os.environ:
        _set_here.add(name)
        os.environ[name] = value


def take_back() -> None:
    """Take out of the environment what `set_default` has set: NVSHMEM was not initialised by it."""
    for name in _set_here:
        os.environ.pop(name, None)
    _set_here.clear()


def given_by_user() -> dict[str, str]:
    """Return this process's environment without what was set by `set_default`."""
    return {name: value for name, value in os.environ.items() if name not in _set_here}


def enables_ibgda(environment: Mapping[str, str]) -> bool:
    """Tell whether NVSHMEM is told to make queue pairs for kernels."""
    return is_on(environment, ENABLE_IBGDA)


def nics_prefix(environment: Mapping[str, str]) -> str:
    """Return how the names of the NICs begin that NVSHMEM uses."""
    return environment.get("NVSHMEM_HCA_PREFIX") or "mlx5"
