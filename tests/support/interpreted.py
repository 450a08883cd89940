"""Ranks as threads whose kernels are the compiler's PTX, interpreted."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from deep_ep_py import buffer
from deep_ep_py.core.native import C
from deep_ep_py.device.cpu import CpuDevice
from deep_ep_py.device.device import Compiling, Device, MakeLauncher
from deep_ep_py.jit import NvrtcUnavailableError, require_nvrtc
from deep_ep_py.jit.ptx import compile_ptx
from deep_ep_py.jit.registry import KERNELS, Shape, has_bulk_copies

_lock = threading.Lock()


@cache
def image_of(name: str, shape: tuple[int, int, int] | None, architecture: str) -> tuple[str, Any]:
    """A kernel's symbol, and the module that has it."""
    load_builtins()
    ranks, row_bytes, topk = shape or (1, 16, 1)
    static = Shape(ranks, row_bytes, topk, bulk_copies=has_bulk_copies(architecture))
    text, symbol = compiled(name, static, architecture)
    return symbol, C.ptx.Image(text)


@cache
def compiled(name: str, shape: Shape, architecture: str) -> tuple[str, str]:
    """A kernel's PTX, and its symbol there."""
    return compile_ptx(KERNELS[name], shape, architecture)


@cache
def load_builtins() -> None:
    """NVRTC opens a library that lies beside it by its name alone. A sanitizer's runtime opens it in NVRTC's place, and
    would not look there.
    """
    from cuda.pathfinder import load_nvidia_dynamic_lib

    found = load_nvidia_dynamic_lib("nvrtc").abs_path
    assert found is not None
    for path in Path(found).parent.glob("libnvrtc-builtins.so.*"):
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


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
