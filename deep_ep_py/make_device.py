"""Which device a Buffer's tensors are on."""

from __future__ import annotations

import torch

from .cpu_device import CpuDevice
from .cuda_device import CudaDevice
from .devices import Device, MakeLauncher


def make_device(device: torch.device, sharers: int, linked: bool, make_launcher: MakeLauncher | None = None) -> Device:
    """Return the device by torch's name for it; "cuda" is the current one.

    `sharers`: ranks that are on it; `linked`: others are in other processes. `make_launcher`: where the sharers launch
    together.
    """
    if device.type == "cpu":
        return CpuDevice()
    index = device.index
    if index is None:
        index = torch.cuda.current_device() if torch.cuda.is_available() else 0
    return CudaDevice(torch.device("cuda", index), sharers, linked, make_launcher)
