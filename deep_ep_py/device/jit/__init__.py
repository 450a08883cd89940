"""Kernels for GPUs, compiled from `csrc/` by NVRTC for exactly the shape in use, without a GPU or a CUDA toolkit."""

from __future__ import annotations

from deep_ep_py.device.jit.cache import KernelCache
from deep_ep_py.device.jit.compiler import (
    CompiledKernel,
    CompileError,
    NvrtcUnavailableError,
    compile_kernel,
    require_nvrtc,
)
from deep_ep_py.device.jit.registry import GATHERED, KERNELS, Kernel, Shape, copy_piece
from deep_ep_py.device.jit.resources import Resources

__all__ = [
    "GATHERED",
    "KERNELS",
    "CompileError",
    "CompiledKernel",
    "Kernel",
    "KernelCache",
    "NvrtcUnavailableError",
    "Resources",
    "Shape",
    "compile_kernel",
    "copy_piece",
    "require_nvrtc",
]
