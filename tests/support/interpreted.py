"""Ranks as threads whose kernels are the compiler's PTX, interpreted."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from functools import cache
from typing import Any

import pytest

from deep_ep_py import buffer
from deep_ep_py.core.native import C
from deep_ep_py.device.cpu import CpuDevice
from deep_ep_py.device.device import Compiling, Device, MakeLauncher
from deep_ep_py.jit import NvrtcUnavailableError, require_nvrtc
from deep_ep_py.jit.registry import KERNELS, Shape, has_bulk_copies
from ptx_kernels import ptx_cache

_lock = threading.Lock()


@cache
def image_of(name: str, shape: tuple[int, int, int] | None, architecture: str) -> tuple[str, Any]:
    """A kernel's symbol, and the module that has it."""
    ranks, row_bytes, topk = shape or (1, 16, 1)
    static = Shape(ranks, row_bytes, topk, bulk_copies=has_bulk_copies(architecture))
    text, symbol = compiled(name, static, architecture)
    return symbol, C.ptx.Image(text)


def compiled(name: str, shape: Shape, architecture: str) -> tuple[str, str]:
    """A kernel's PTX, and its symbol there."""
    kernel = ptx_cache().get(KERNELS[name], shape, architecture)
    return kernel.cubin.decode().rstrip("\0"), kernel.symbol


class Interpreted(CpuDevice):
    """A GPU, as far as its kernels see: memory is the CPU's."""

    def __init__(self, architecture: str) -> None:
        super().__init__()
        self.architecture = architecture
        self.kernels = C.ptx.Kernels(bulk_copies=has_bulk_copies(architecture))

    def prepare(self, kernels: Iterable[str], shape: tuple[int, int, int], compiling: Compiling) -> None:
        for name in kernels:
            key = shape if KERNELS[name].takes_shape else (0, 0, 0)
            if not self.kernels.has(name, key):
                with compiling(), _lock:
                    found = image_of(name, shape if KERNELS[name].takes_shape else None, self.architecture)
                self.kernels.add(name, key, *found)

    def make_runtime(self, options: Any, heaps: list[Any], network: Any) -> Any:
        for heap in heaps:
            C.ptx.add_heap(heap.base, heap.bytes)
        return C.Runtime(options, heaps, network, self.kernels)


def install(monkeypatch: Any, architecture: str = "sm_90a") -> None:
    """Let Buffers be made on it; skips the test where NVRTC is not installed."""
    try:
        require_nvrtc()
    except NvrtcUnavailableError as error:
        pytest.skip(str(error))

    def make_device(device: Any, sharers: int, linked: bool, make_launcher: MakeLauncher | None = None) -> Device:
        del device, sharers, linked, make_launcher
        return Interpreted(architecture)

    monkeypatch.setattr(buffer, "make_device", make_device)
