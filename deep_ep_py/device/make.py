"""Which device a Buffer's tensors are on."""

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
    """Have Buffers on the CPU that are made meanwhile, by any thread, use another device, which tools provide."""
    global _make_cpu
    before, _make_cpu = _make_cpu, make
    try:
        yield
    finally:
        _make_cpu = before


def make_device(device: torch.device, sharers: int, linked: bool, make_launcher: MakeLauncher | None = None) -> Device:
    """Return the device by torch's name for it; "cuda" is the current one.

    `sharers`: ranks that are on it; `linked`: others are in other processes. `make_launcher`: where the sharers launch
    together.
    """
    if device.type == "cpu":
        return _make_cpu()
    index = device.index
    if index is None:
        index = torch.cuda.current_device() if torch.cuda.is_available() else 0
    return CudaDevice(torch.device("cuda", index), sharers, linked, make_launcher)
