"""What the probes share: kernels of this folder, launched by the library or by bare calls of the driver; and memory."""

from __future__ import annotations

import ctypes
import json
import statistics
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from deep_ep_py.base.native import C
from deep_ep_py.base.sources import include_root
from deep_ep_py.device.jit import CompiledKernel, Kernel, Shape, compile_kernel
from deep_ep_py.tools.bench.machine import describe_machine

FOLDER = Path(__file__).resolve().parent
NO_SHAPE = (0, 0, 0)
WARP_THREADS = 32
_CYCLES_PER_MS = 2_000_000
_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_COOPERATIVE = 2  # CU_LAUNCH_ATTRIBUTE_COOPERATIVE


def gpu() -> torch.device:
    """Return the current GPU, as torch names it."""
    return torch.device("cuda", torch.cuda.current_device())


def large_bytes() -> int:
    """Return the size of memory that no cache holds: 1 GiB on a GPU that has room for several of them."""
    memory: int = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    return min(1 << 30, memory // 64 // 4096 * 4096)


def compiled(source: str, expression: str, context: Any) -> CompiledKernel:
    """Compile a kernel of a file in this folder."""
    kernel = Kernel(expression, source, expression)
    return compile_kernel(kernel, Shape(*NO_SHAPE), context.architecture, (FOLDER, include_root()))


def words(*values: int) -> bytes:
    """Return a kernel's arguments, each a word of 8 bytes."""
    return struct.pack(f"={len(values)}Q", *values)


class Results:
    """Words in the GPU's memory that kernels write, zero before each use.

    Parameters
    ----------
    context
        The GPU.
    count
        Number of words.
    """

    def __init__(self, context: Any, count: int) -> None:
        self._memory, self._count = C.cuda.Memory(context), count
        size = 2 << 20
        self._heap = C.cuda.make_heap(context, size, size, 0, False)
        self.address: int = self._heap.base

    def clear(self) -> None:
        """Set all words to zero."""
        self._memory.store_words([self.address + 8 * index for index in range(self._count)], 0)

    def read(self) -> list[int]:
        """Return the words."""
        return [self._memory.load_word(self.address + 8 * index) for index in range(self._count)]


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("padding", ctypes.c_char * 4), ("value", ctypes.c_int * 16))


class _Config(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


class BareKernel:
    """A kernel that is launched by a bare call of the driver: no check, and no event after it.

    Parameters
    ----------
    context
        The GPU.
    kernel
        Its code.
    shared_bytes
        The most dynamic shared memory that a launch asks for.
    """

    def __init__(self, context: Any, kernel: CompiledKernel, shared_bytes: int = 0) -> None:
        self._context, self._driver = context, ctypes.CDLL("libcuda.so.1")
        module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        self._code = kernel.cubin  # the driver may read it later
        with context.current():
            self._check(self._driver.cuModuleLoadData(ctypes.byref(module), self._code))
            symbol = kernel.symbol.encode()
            self._check(self._driver.cuModuleGetFunction(ctypes.byref(self._function), module, symbol))
            self._check(self._driver.cuFuncSetAttribute(self._function, _DYNAMIC_SHARED, shared_bytes))

    def launch(
        self, stream: int, blocks: int, threads: int, arguments: bytes, shared_bytes: int = 0, cooperative: bool = False
    ) -> None:
        """Launch it on a stream."""
        attribute = _Attribute(_COOPERATIVE)
        attribute.value[0] = int(cooperative)
        config = _Config(
            (blocks, 1, 1), (threads, 1, 1), shared_bytes, stream, ctypes.pointer(attribute), int(cooperative)
        )
        held = ctypes.create_string_buffer(arguments, len(arguments))
        parameters = (ctypes.c_void_p * 1)(ctypes.cast(held, ctypes.c_void_p))
        with self._context.current():
            self._check(self._driver.cuLaunchKernelEx(ctypes.byref(config), self._function, parameters, None))

    @staticmethod
    def _check(result: int) -> None:
        if result != 0:
            raise RuntimeError(f"a call of the driver returned error {result}")


class Gate:
    """A moment at which streams start together, once all their work is queued."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        self._milliseconds = 10.0

    def time(self, streams: list[Any], queue: Callable[[], None]) -> float:
        """Return the milliseconds from the gate's opening to the end of what `queue` queues on the streams."""
        while True:
            torch.cuda.synchronize()
            opened = torch.cuda.Event(enable_timing=True)
            with torch.cuda.stream(self._stream):
                torch.cuda._sleep(int(self._milliseconds * _CYCLES_PER_MS))
                opened.record()
            for stream in streams:
                stream.wait_event(opened)
            queue()
            ends = [torch.cuda.Event(enable_timing=True) for _ in streams]
            for end, stream in zip(ends, streams, strict=True):
                end.record(stream)
            late = opened.query()
            for end in ends:
                end.synchronize()
            if not late or self._milliseconds > 1000:
                return max(opened.elapsed_time(end) for end in ends)
            self._milliseconds *= 2  # it opened before everything was queued


def median_of(times: int, measure: Callable[[], float]) -> float:
    """Return the median of several measurements, after one that does not count."""
    measure()
    return statistics.median(measure() for _ in range(times))


def table(title: str, columns: list[str], rows: list[list[Any]]) -> dict[str, Any]:
    """Return a table of a report."""
    return {"title": title, "columns": columns, "rows": rows}


def write_figures(file: Path | None, boundary: str, tables: list[dict[str, Any]], **more: Any) -> None:
    """Print the figures of a program, and write them to a file if one is named."""
    figures = {"boundary": boundary, "tables": tables, **more, "machine": describe_machine()}
    for one in tables:
        print(one["title"])
        print("; ".join(one["columns"]))
        for row in one["rows"]:
            print("; ".join(f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in row))
    if file is not None:
        file.write_text(json.dumps(figures, indent=2) + "\n")
