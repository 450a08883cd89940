"""Compilation of kernels with NVRTC, through `cuda.core`."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deep_ep_py.base.sources import include_root
from deep_ep_py.device.jit.registry import Kernel, Shape, copy_piece
from deep_ep_py.device.jit.resources import DYNAMIC_SHARED_SYMBOL, Resources, read_resources
from deep_ep_py.errors import CudaError

_importing = threading.Lock()
_PACKAGE = Path(__file__).resolve().parents[2]
INSTALL = "pip install cuda-core cuda-bindings nvidia-cuda-nvrtc"


class NvrtcUnavailableError(RuntimeError):
    """Error for a missing NVRTC, or a missing package that gives access to it.

    Parameters
    ----------
    reason : str
        What is missing; the message adds how to install it.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(f"NVRTC cannot be used ({INSTALL}): {reason}")
        self.reason = reason


class CompileError(RuntimeError):
    """Failure to compile a kernel; the message contains NVRTC's log."""


OPTIONS = {
    "std": "c++17",
    # The constexpr functions of wire/ have no target attributes; this makes them device functions.
    "device_as_default_execution_space": True,
    "ptxas_options": ["-v"],
    "lineinfo": True,  # for profilers and compute-sanitizer; it does not change any instruction
}
"""Options for all kernels, besides name, architecture and include path."""


@dataclass(frozen=True)
class CompiledKernel:
    """A kernel, compiled for one shape and one architecture."""

    name: str
    architecture: str
    symbol: str
    cubin: bytes
    resources: Resources
    seconds: float
    log: str


def require_nvrtc() -> None:
    """Raise `NvrtcUnavailableError` if NVRTC cannot be used."""
    try:
        # Two threads, such as rank threads, that import cuda.core at once may both see it partially initialized.
        with _importing:
            from cuda.bindings import nvrtc
            from cuda.core import Program  # noqa: F401
    except ImportError as error:
        raise NvrtcUnavailableError(str(error)) from None
    try:
        nvrtc.nvrtcVersion()
    except RuntimeError as error:
        raise NvrtcUnavailableError(str(error)) from None


def nvrtc_version() -> str:
    """Return NVRTC's version, for example "13.0"."""
    require_nvrtc()
    from cuda.bindings import nvrtc

    _, major, minor = nvrtc.nvrtcVersion()
    return f"{major}.{minor}"


def check_driver(version: int) -> None:
    """Check that a driver loads what this NVRTC compiles: it must be of the same major version, or newer.

    Parameters
    ----------
    version : int
        The CUDA version that the driver supports, for example 12080.

    Raises
    ------
    CudaError
        The message says what to install.
    """
    newest, ours = version // 1000, int(nvrtc_version().partition(".")[0])
    if ours > newest:
        packages = (
            ", or the packages for CUDA 12: pip uninstall nvidia-cuda-nvrtc cuda-bindings, then pip install "
            "'deep_ep_py[gpu-cu12]'"
        )
        raise CudaError(
            f"the driver supports CUDA {newest}.{version % 1000 // 10}, and loads no kernels of NVRTC "
            f"{nvrtc_version()}: expected a driver for CUDA {ours}{packages if newest == 12 else ''}"
        )


def known_architectures() -> list[str]:
    """Return the architectures that the installed NVRTC compiles for, such as "sm_90"; none if it is not installed."""
    try:
        require_nvrtc()
    except NvrtcUnavailableError:
        return []
    from cuda.bindings import nvrtc

    _, found = nvrtc.nvrtcGetSupportedArchs()
    return [f"sm_{number}" for number in found]


def source_of(kernel: Kernel, shape: Shape, architecture: str) -> str:
    """Return the text of the program that NVRTC compiles."""
    piece = copy_piece(architecture) if shape.bulk_copies else 0
    # The header's own function computes the shared memory of a launch; the cubin carries the result.
    includes = "".join(f'#include "{header}"\n' for header in (*kernel.before, kernel.header))
    return (
        f"#define DEEP_EP_COPY_PIECE {piece}\n{shape.macros}"
        f"{includes}"
        f'extern "C" __constant__ unsigned int {DYNAMIC_SHARED_SYMBOL} = {kernel.dynamic_shared_for(shape)};\n'
    )


def compile_kernel(
    kernel: Kernel, shape: Shape, architecture: str, include_paths: tuple[Path, ...] | None = None
) -> CompiledKernel:
    """Compile one kernel.

    Parameters
    ----------
    kernel
        The kernel.
    shape
        Constants of the instantiation.
    architecture
        For example `sm_90a`.
    include_paths
        Where to look for headers. Default: only the library's own sources.

    Returns
    -------
    CompiledKernel

    Raises
    ------
    CompileError
        NVRTC refuses the kernel or the architecture.
    NvrtcUnavailableError
        NVRTC is not installed.
    """
    expression = kernel.expression_for(shape)
    log = io.StringIO()
    started = time.perf_counter()
    text, paths = source_of(kernel, shape, architecture), include_paths or (include_root(),)
    code = _compile(kernel.name, text, architecture, paths, [expression], log)
    seconds = time.perf_counter() - started
    symbol = code.symbol_mapping[expression].decode()
    cubin = bytes(code.code)
    resources = read_resources(symbol, log.getvalue(), cubin)
    return CompiledKernel(kernel.name, architecture, symbol, cubin, resources, seconds, log.getvalue())


def compile_text(name: str, text: str, architecture: str) -> bytes:
    """Compile a program without kernels, to read its symbols.

    Parameters
    ----------
    name
        Its name in error messages.
    text
        The program, which has no includes.
    architecture
        For example `sm_90a`.

    Returns
    -------
    bytes
        The cubin.

    Raises
    ------
    CompileError, NvrtcUnavailableError
        As `compile_kernel`.
    """
    return bytes(_compile(name, text, architecture, (), [], io.StringIO()).code)


def _compile(
    name: str, text: str, architecture: str, include_paths: Sequence[Path], expressions: list[str], log: io.StringIO
) -> Any:
    require_nvrtc()
    from cuda.core import Program, ProgramOptions

    options = ProgramOptions(
        name=f"{name}.cu", arch=architecture, include_path=[str(path) for path in include_paths], **OPTIONS
    )
    try:
        return Program(text, "c++", options).compile("cubin", name_expressions=expressions, logs=log)
    # NVRTC's own error type is private to cuda.core.
    except Exception as error:
        raise CompileError(f"{name} for {architecture}: {error}") from error
