"""A GPU that is none: CUDA's code paths over the stand-in for the driver, whose memory and kernels are a CPU's."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from deep_ep_py import buffer, jit
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


class NamesOnly:
    """In place of the cache of kernels: no code, but the symbols by which the stand-in knows what to run."""

    def get_all(
        self, kernels: Iterable[jit.Kernel], shape: jit.Shape, architecture: str, start: int
    ) -> list[jit.CompiledKernel]:
        del shape, start
        nothing = jit.Resources(0, 0, 0, 0, 0, 0, 0, 0)
        symbols = {kernel.name: f"_ZN7deep_ep{len(kernel.name)}{kernel.name}" for kernel in kernels}
        return [jit.CompiledKernel(name, architecture, symbols[name], b"\x7fELF", nothing, 0.0, "") for name in symbols]


def install(compile_kernels: bool = True) -> None:
    """Let Buffers be made on it."""
    if not compile_kernels:
        jit.KernelCache = NamesOnly  # type: ignore[assignment, misc]

    def make_device(device: torch.device, sharers: int) -> Device:
        del device
        return PretendGpu(sharers)

    buffer.make_device = make_device
