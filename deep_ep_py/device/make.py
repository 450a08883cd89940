"""The choice of the device that a Buffer's tensors are on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from deep_ep_py.device.cpu import CpuDevice
from deep_ep_py.device.cuda import CudaDevice
from deep_ep_py.device.device import Device, MakeLauncher

_make_cpu: Callable[[], Device] = CpuDevice


@contextmanager
def cpu_made_by(make: Callable[[], Device]) -> Iterator[None]:
    """Make CPU Buffers that any thread creates in this context use another device; tools provide it."""
    global _make_cpu
    before, _make_cpu = _make_cpu, make
    try:
        yield
    finally:
        _make_cpu = before


def make_device(device: torch.device, sharers: int, linked: bool, make_launcher: MakeLauncher | None = None) -> Device:
    """Return the device that torch's device names; "cuda" is the current GPU.

    `sharers`: number of ranks on it. `linked`: whether other ranks are in other processes. `make_launcher`: given if
    the sharers launch together.
    """
    if device.type == "cpu":
        return _make_cpu()
    index = device.index
    if index is None:
        index = torch.cuda.current_device() if torch.cuda.is_available() else 0
    return CudaDevice(torch.device("cuda", index), sharers, linked, make_launcher)
