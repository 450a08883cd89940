"""Compilation of kernels to PTX with NVRTC directly: `cuda.core` would require a driver, which PTX does not need."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from deep_ep_py.base.sources import include_root
from deep_ep_py.device.jit.cache import Compile, KernelCache, default_folder
from deep_ep_py.device.jit.compiler import CompiledKernel, CompileError, require_nvrtc, source_of
from deep_ep_py.device.jit.registry import Kernel, Shape
from deep_ep_py.device.jit.resources import Resources

_OPTIONS = ("-std=c++17", "-default-device", "-lineinfo")


def compile_ptx(kernel: Kernel, shape: Shape, architecture: str) -> tuple[str, str]:
    """Compile one kernel like `compile_kernel`, but only to PTX.

    Parameters
    ----------
    kernel
        The kernel.
    shape
        Constants of the instantiation.
    architecture
        For example `sm_90a`.

    Returns
    -------
    text : str
        The PTX, with line information.
    symbol : str
        The kernel's name in the PTX.

    Raises
    ------
    CompileError
        NVRTC refuses the kernel or the architecture.
    NvrtcUnavailableError
        NVRTC is not installed.
    """
    require_nvrtc()
    from cuda.bindings import nvrtc

    expression = kernel.expression_for(shape).encode()
    source = source_of(kernel, shape, architecture).encode()
    (program,) = _done(nvrtc.nvrtcCreateProgram(source, f"{kernel.name}.cu".encode(), 0, [], []))
    try:
        _done(nvrtc.nvrtcAddNameExpression(program, expression))
        virtual = architecture.replace("sm_", "compute_")
        options = [option.encode() for option in (f"-arch={virtual}", f"-I{include_root()}", *_OPTIONS)]
        if int(nvrtc.nvrtcCompileProgram(program, len(options), options)[0]) != 0:
            log = _text(program, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog)
            raise CompileError(f"{kernel.name} for {architecture}: {log}")
        text = _text(program, nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX)
        (symbol,) = _done(nvrtc.nvrtcGetLoweredName(program, expression))
        return text, symbol.decode()
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def compile_kernel_as_ptx(kernel: Kernel, shape: Shape, architecture: str) -> CompiledKernel:
    """Compile one kernel like `compile_ptx`, for a cache.

    Returns
    -------
    CompiledKernel
        Its code is the zero-terminated text, as the driver accepts it. Its resources are unknown, since ptxas has not
        run.
    """
    started = time.perf_counter()
    text, symbol = compile_ptx(kernel, shape, architecture)
    unknown = Resources(0, 0, 0, 0, 0, 0, 0, 0)
    seconds = time.perf_counter() - started
    return CompiledKernel(kernel.name, architecture, symbol, text.encode() + b"\0", unknown, seconds, "")


class PtxCache:
    """A cache of kernels as PTX on disk, in a separate `KernelCache`.

    Parameters
    ----------
    folder
        The folder. Default: a subfolder of the one for compiled kernels.
    compile_
        Compiles a kernel that is not in the cache.
    """

    def __init__(self, folder: Path | None = None, compile_: Compile = compile_kernel_as_ptx) -> None:
        self.kernels = KernelCache(default_folder() / "ptx" if folder is None else folder, compile_)

    def get(self, kernel: Kernel, shape: Shape, architecture: str) -> tuple[str, str]:
        """Return the result of `compile_ptx`; raise like `compile_ptx` and `KernelCache.get_all`."""
        found = self.kernels.get(kernel, shape, architecture)
        return found.cubin.decode().rstrip("\0"), found.symbol


def _text(program: Any, get_size: Any, get: Any) -> str:
    (size,) = _done(get_size(program))
    held = b" " * size
    _done(get(program, held))
    return held.decode().rstrip("\0")


def _done(result: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the results of an NVRTC call that follow its status; raise if the status is an error."""
    status, *given = result
    if int(status) != 0:
        raise CompileError(f"NVRTC: {status}")
    return tuple(given)
