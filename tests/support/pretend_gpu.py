"""A pretend GPU: CUDA's code paths over the stand-in for the driver, with memory and kernels on a CPU."""

from __future__ import annotations

import ctypes
import gc
import math
import os
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from builds import INTERPRETED
from deep_ep_py import buffer
from deep_ep_py.base.events import EventHandle
from deep_ep_py.base.native import C
from deep_ep_py.device import jit
from deep_ep_py.device.cuda import CudaDevice
from deep_ep_py.device.device import Device, MakeLauncher
from deep_ep_py.transport.nvshmem import probe
from ptx_kernels import ptx_cache


class PretendGpu(CudaDevice):
    """Runs torch's GPU work on the CPU; the driver, the kernels' code and the heaps take the GPU's paths.

    The caller waits for the kernels where on a GPU its stream would, except in the body of `on_stream`.
    """

    warps = 4  # each thread is a fiber
    max_arena_bytes = 16 << 20

    def __init__(self, sharers: int, make_launcher: MakeLauncher | None = None) -> None:
        super().__init__(torch.device("cuda", 0), sharers, make_launcher=make_launcher)
        self.torch_device = torch.device("cpu")
        self.runtime: Any = None
        self._segments = Segments()
        weakref.finalize(self, self._segments.close).atexit = False

    def _set_share(self, ranks: int) -> None:
        super()._set_share(ranks)
        self.blocks = 2

    def default_arena_bytes(self, ranks: int, by_nics: bool) -> tuple[int, int]:
        most = self.max_arena_bytes
        return most if by_nics else min(most, self.first_arena_bytes), most

    def make_runtime(self, options: Any, heaps: list[Any], near: list[Any], network: Any) -> Any:
        self.runtime = super().make_runtime(options, heaps, near, network)
        return self.runtime

    def _empty_in_pool(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        size = math.prod(shape) * dtype.itemsize
        address = self._segments.take(size)
        # Only instances of a subclass support weak references.
        segment = type("Segment", (ctypes.c_uint8 * size,), {}).from_address(address)
        weakref.finalize(segment, self._segments.give, address, size).atexit = False
        return torch.frombuffer(segment, dtype=torch.uint8).view(dtype).view(shape)

    def capturing(self) -> bool:
        return getattr(_captures, "open", False)

    def synchronize(self) -> None:
        pass  # Graph.replay has already waited

    def allocating(self, on_comm_stream: bool) -> AbstractContextManager[Any]:
        return nullcontext()

    def callers_stream(self) -> Callable[[], AbstractContextManager[Any]]:
        return nullcontext

    def launch_on_callers_stream(self) -> None:
        if not self._gathered:
            self._launcher.launch_on(getattr(_current, "stream", None))

    def order_after_caller(self, event: EventHandle | None, on_comm_stream: bool) -> None:
        if not self._gathered:
            self._launcher.launch_on(None)

    def order_caller_after(
        self, tensors: Sequence[torch.Tensor | None], async_finish: bool, on_comm_stream: bool
    ) -> EventHandle:
        if not self.capturing() and getattr(_current, "stream", None) is None:
            assert self.runtime.settle(100.0)
        return EventHandle()


_current = threading.local()


def make_stream() -> int:
    """Make a stream of the stand-in's first GPU, for the body of `on_stream`."""
    stream = ctypes.c_void_p()
    with C.cuda.Context(0).current():
        assert ctypes.CDLL("libcuda.so.1").cuStreamCreateWithPriority(ctypes.byref(stream), 0, 0) == 0
    assert stream.value is not None
    return stream.value


@contextmanager
def on_stream(stream: int) -> Iterator[None]:
    """Launch the kernels that would go to the caller's stream on this one, without waiting for any."""
    _current.stream = stream
    try:
        yield
    finally:
        _current.stream = None


@contextmanager
def busy(stream: int) -> Iterator[None]:
    """Let a kernel of the program run in a stream during the body."""
    driver = ctypes.CDLL("libcuda.so.1")
    driver.double_begin_kernel.restype, driver.double_begin_kernel.argtypes = ctypes.c_uint64, [ctypes.c_void_p]
    driver.double_end_kernel.argtypes = [ctypes.c_uint64]
    kernel = driver.double_begin_kernel(stream)
    try:
        yield
    finally:
        driver.double_end_kernel(kernel)


class Segments:
    """A pool of torch's allocator: it keeps freed memory for requests of the same size as long as the pool lives,
    asks for more otherwise, and raises if there is none.
    """

    def __init__(self) -> None:
        self._kept: dict[int, list[int]] | None = defaultdict(list)

    def take(self, size: int) -> int:
        if self._kept is not None and self._kept[size]:
            return self._kept[size].pop()
        address = pool_functions()[0](size, 0, None)
        if address is None:
            raise torch.cuda.OutOfMemoryError(f"{size} bytes")
        return address

    def give(self, address: int, size: int) -> None:
        if self._kept is None:
            pool_functions()[1](address, size, 0, None)
        else:
            self._kept[size].append(address)

    def close(self) -> None:
        kept, self._kept = self._kept or {}, None
        for size, addresses in kept.items():
            for address in addresses:
                self.give(address, size)


def pool_functions() -> tuple[Any, Any]:
    """Return the functions that torch's allocator calls for a pool: to allocate and to free bytes."""
    native = ctypes.CDLL(C.__file__)
    allocate, free = native.deep_ep_pool_allocate, native.deep_ep_pool_free
    allocate.restype, free.restype = ctypes.c_void_p, None
    allocate.argtypes = [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
    free.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
    return allocate, free


class NamesOnly:
    """A replacement for the cache of kernels: no code, only the symbols by which the stand-in chooses what to run."""

    def get_all(
        self, kernels: Iterable[jit.Kernel], shape: jit.Shape, architecture: str, start: int
    ) -> list[jit.CompiledKernel]:
        del shape, start
        nothing = jit.Resources(0, 0, 0, 0, 0, 0, 0, 0)
        symbols = {kernel.name: _symbol(kernel) for kernel in kernels}
        return [jit.CompiledKernel(name, architecture, symbols[name], b"\x7fELF", nothing, 0.0, "") for name in symbols]


def _symbol(kernel: jit.Kernel) -> str:
    """Return the beginning of the symbol that NVRTC would give it."""
    alone = kernel.expression.removeprefix("deep_ep::device::of_each_rank<")
    scope = "_ZN7deep_ep" if alone == kernel.expression else "_ZN7deep_ep6device12of_each_rankIXadL_ZNS_"
    names = alone.partition("<")[0].removesuffix(">").split("::")[1:]
    return scope + "".join(f"{len(name)}{name}" for name in names)


_captures = threading.local()


class Graph:
    """One thread's launches in the body of `capture`; may be replayed any number of times."""

    def __init__(self) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._number = -1

    @contextmanager
    def capture(self) -> Iterator[None]:
        self._driver.double_capture(1)
        _captures.open = True
        try:
            yield
        finally:
            _captures.open = False
            self._number = self._driver.double_capture(0)

    def replay(self) -> None:
        self._driver.double_replay(self._number)

    def drop(self) -> None:
        self._driver.double_drop(self._number)


def take_compiled_probe() -> None:
    """Read NVSHMEM's state with a module compiled elsewhere, because NVRTC must not find the stand-in for the
    driver."""
    probe._cubin = lambda _: Path(os.environ["PROBE_CUBIN"]).read_bytes()  # type: ignore[assignment]


def install(compile_kernels: bool = True) -> None:
    """Let Buffers be made on the pretend GPU."""
    gc.freeze()  # a run of ranks collects garbage first, which need not look through all of torch
    if os.environ.get(INTERPRETED):
        jit.KernelCache = lambda: ptx_cache(over_stand_in=True).kernels  # type: ignore[assignment, misc]
    elif not compile_kernels:
        jit.KernelCache = NamesOnly  # type: ignore[assignment, misc]

    def make_device(
        device: torch.device, sharers: int, linked: bool, make_launcher: MakeLauncher | None = None
    ) -> Device:
        del device, linked
        return PretendGpu(sharers, make_launcher)

    buffer.make_device = make_device
