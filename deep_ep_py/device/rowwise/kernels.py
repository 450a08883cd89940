"""Choice of kernels: Triton on a GPU, and on a CPU under its interpreter; otherwise torch.

The environment variable TRITON_INTERPRET=1, set before Triton is first imported, selects the interpreter.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from typing import Any

import torch

from deep_ep_py.device.rowwise import torch_kernels

_FIRST_WITH_E4M3 = (8, 9)


@functools.cache
def _triton_kernels() -> Any:
    """Return the Triton kernels, or None if Triton is not installed."""
    if importlib.util.find_spec("triton") is None:
        return None
    from deep_ep_py.device.rowwise import triton_kernels

    return triton_kernels


def kernels_for(device: torch.device) -> Any:
    """Return the module whose functions compute on tensors on `device`."""
    if device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1":
        return _triton_kernels() or torch_kernels
    return torch_kernels


def casts_for(device: torch.device) -> Any:
    """Return the module for casts to and from FP8: Triton has no e4m3 for GPUs before sm_89."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < _FIRST_WITH_E4M3:
        return torch_kernels
    return kernels_for(device)
