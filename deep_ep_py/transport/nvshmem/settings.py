"""Settings of the environment that matter before NVSHMEM is loaded."""

from __future__ import annotations

import os
from collections.abc import Mapping

INSTALL = "pip install nvshmem4py-cu13"
ENABLE_IBGDA = "NVSHMEM_IB_ENABLE_IBGDA"
"""The variable that makes NVSHMEM create queue pairs for kernels; it is off by default."""
_NO = ("", "0", "f", "false", "n", "no", "off")


def is_on(environment: Mapping[str, str], name: str) -> bool:
    """Return whether an NVSHMEM variable is set to something other than no."""
    return environment.get(name, "").lower() not in _NO


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


def nics_prefix(environment: Mapping[str, str]) -> str:
    """Return the prefix of the names of the NICs that NVSHMEM uses."""
    return environment.get("NVSHMEM_HCA_PREFIX") or "mlx5"
