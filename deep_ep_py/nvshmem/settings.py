"""What is asked of a machine and of the environment before NVSHMEM is loaded."""

from __future__ import annotations

from collections.abc import Mapping

INSTALL = "pip install nvshmem4py-cu13"
ENABLE_IBGDA = "NVSHMEM_IB_ENABLE_IBGDA"
"""The variable that has NVSHMEM make queue pairs for kernels; it is off by default."""
_NO = ("", "0", "f", "false", "n", "no", "off")


def is_on(environment: Mapping[str, str], name: str) -> bool:
    """Tell whether a variable of NVSHMEM's is set, and to something else than no."""
    return environment.get(name, "").lower() not in _NO


def enables_ibgda(environment: Mapping[str, str]) -> bool:
    """Tell whether NVSHMEM is told to make queue pairs for kernels."""
    return is_on(environment, ENABLE_IBGDA)


def nics_prefix(environment: Mapping[str, str]) -> str:
    """Return how the names of the NICs begin that NVSHMEM uses."""
    return environment.get("NVSHMEM_HCA_PREFIX") or "mlx5"
