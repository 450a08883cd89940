"""A GPU that is none: CUDA's code paths over the stand-in for the driver, whose memory and kernels are a CPU's."""

from __future__ import annotations

import torch

from deep_ep_py import buffer
from deep_ep_py.devices import CudaDevice, Device


class PretendGpu(CudaDevice):
    """What torch would do on a GPU it does on the CPU here; the driver, kernels' code and heaps go the GPU's way."""

    def __init__(self, sharers: int) -> None:
        super().__init__(torch.device("cuda", 0), sharers)
        self.torch_device, self.dlpack, self.blocks = torch.device("cpu"), (1, 0), 2

    def default_arena_bytes(self, ranks: int) -> int:
        del ranks
        return 16 << 20

    def settle(self) -> None:
        pass


def install() -> None:
    """Let Buffers be made on it."""

    def make_device(device: torch.device, sharers: int) -> Device:
        del device
        return PretendGpu(sharers)

    buffer.make_device = make_device
