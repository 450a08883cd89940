"""The CPU as a device: kernels run on the executor, and tensors are in memory shared by the ranks."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.utils.dlpack

from deep_ep_py.base.cgroups import free_memory, memory_limit
from deep_ep_py.base.events import EventHandle
from deep_ep_py.base.gpus import GpuAnswer
from deep_ep_py.base.machine_files import Files
from deep_ep_py.base.native import C
from deep_ep_py.device.device import Compiling, Shape
from deep_ep_py.errors import DeepEPError

_DLPACK_TYPES = {
    torch.bfloat16: (4, 16),
    torch.float32: (2, 32),
    torch.int64: (0, 64),
    torch.int32: (0, 32),
    torch.uint8: (1, 8),
}
"""DLPack's type code and bits."""


_FILES = Files(Path("/"), live=True)


@cache
def _carried(dtype: torch.dtype) -> tuple[torch.dtype, int, int]:
    """Return the type under which tensors of `dtype` are handed over, with its code and bits.

    Not every torch accepts FP8 over DLPack, so one-byte types travel as uint8 and two-byte types as bfloat16.
    """
    carried = {1: torch.uint8, 2: torch.bfloat16}.get(dtype.itemsize, dtype)
    return carried, *_DLPACK_TYPES[carried]


@cache
def usable_memory() -> int:
    """Return the memory that this process may use: the machine's, or its cgroup's limit if that is lower."""
    limit = memory_limit(_FILES)
    return limit.bytes if limit is not None else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def writable_memory() -> int:
    """Return the memory that this process may write now: what is free, at most what it may use."""
    free = free_memory(_FILES)
    return usable_memory() if free is None else min(free, usable_memory())


class CpuDevice:
    """The CPU: kernels run as fibers in the thread that waits for them, which is the caller's or a Driver's."""

    torch_device = torch.device("cpu")
    asynchronous = False
    blocks = 1  # one thread runs them all
    calls = 2
    fabrics: tuple[str, ...] = ("peer", "ibgda", "weak", "mixed", "proxy")
    default_fabrics: tuple[str, ...] = ("peer", "ibgda", "proxy")
    gpu = ""
    poison = True
    maps_all = True
    fresh_memory_is_slow = True
    comm_stream = None

    def profiler_range(self, name: str) -> None:
        """Open no range: no profiler of a CPU would show it."""

    def default_arena_bytes(self, ranks: int, by_nics: bool) -> tuple[int, int]:
        """Return half the memory that the process may use, divided by the ranks; untouched pages cost nothing."""
        del by_nics
        share = usable_memory() // (2 * ranks)
        return share, share

    def check_arena_bytes(self, arena_bytes: int) -> None:
        """Refuse more than the memory that the process may use."""
        if arena_bytes > usable_memory():
            raise ValueError(
                f"arena_bytes={arena_bytes}: expected at most {usable_memory()}, the memory that this process may use"
            )

    def room_for_regions(self, in_process: bool) -> int | None:
        """See `Device`. Between processes, pages cost nothing before they are used."""
        return writable_memory() if in_process and self.poison else None

    def make_heap(self, size: int, first: int, cleared: int, in_process: bool, by_nics: bool) -> C.Heap:
        """Allocate plain memory in one process, anonymous shared memory between several; new pages are zero."""
        del first, cleared, by_nics
        try:
            make = C.Heap.make_plain if in_process else C.Heap.make_shared
            return make(size, gives_back=True)  # libfabric pins at most the memory for rows in transit
        except (RuntimeError, OSError) as error:
            raise DeepEPError(
                f"a heap of {size} bytes ({size / 2**30:.1f} GiB) cannot be allocated: {error}. It holds num_nvl_bytes "
                "or num_rdma_bytes for rows in transit, and arena_bytes for outputs: pass less of the larger one "
                "(arena_bytes is by default half of the memory that the process may use, divided by the ranks of the "
                "machine)"
            ) from error

    def map_heap(self, descriptor: int, size: int, first: int, by_nics: bool) -> C.Heap:
        """Map the same memory."""
        del first, by_nics
        return C.Heap.map(descriptor, size)

    def make_copy(self, size: int) -> C.Heap:
        """Allocate plain memory."""
        return C.Heap.make_plain(size)

    def make_runtime(
        self, options: C.BufferOptions, heaps: list[C.Heap], near: list[C.Heap | None], network: C.NetworkOptions
    ) -> C.Runtime:
        """Make a runtime over the executor."""
        return C.Runtime(options, heaps, near, network)

    def share(self, ranks: int) -> None:
        """Do nothing: the executor runs any number of blocks."""

    def answer_about(self, gpu: str) -> GpuAnswer:
        """Know of no GPU; see `Device`."""
        del gpu
        return GpuAnswer("", "this device is not a GPU", access=False)

    def blocks_for(self, moved: float) -> int:
        """Return 1 for any call."""
        del moved
        return self.blocks

    def allocate(
        self, runtime: C.Runtime, shape: tuple[int, ...], dtype: torch.dtype, grows: bool
    ) -> torch.Tensor | None:
        """Allocate straight from the arena; the last reference is the last use, and returns the memory."""
        del grows  # all of it exists from the start
        carried, code, bits = _carried(dtype)
        capsule = runtime.allocate(shape, code, bits)
        if capsule is None:
            return None
        tensor = torch.utils.dlpack.from_dlpack(capsule)
        return tensor if carried is dtype else tensor.view(dtype)

    def view(self, address: int, size: int) -> torch.Tensor:
        """Wrap a C array at that address."""
        if size == 0:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        return torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8)

    def prepare(self, kernels: Iterable[str], shape: Shape, compiling: Compiling) -> None:
        """Do nothing: the kernels are part of the extension, for any shape."""

    def copy(self, target: torch.Tensor, source: torch.Tensor, ranks: int) -> None:
        """Copy, bypassing the caches if all ranks' copies would not fit into them."""
        streaming = source.nbytes * ranks > C.STREAMING_THRESHOLD
        C.copy_row_to_many([target.data_ptr()], source.data_ptr(), source.nbytes, streaming)

    def capturing(self) -> bool:
        """Return False."""
        return False

    def synchronize(self) -> None:
        """Do nothing: no graphs are replayed."""

    def allocating(self, on_comm_stream: bool) -> AbstractContextManager[Any]:
        """Do nothing: there are no streams."""
        del on_comm_stream
        return nullcontext()

    def callers_stream(self) -> Callable[[], AbstractContextManager[Any]]:
        """Do nothing: there are no streams."""
        return nullcontext

    def launch_on_callers_stream(self) -> None:
        """Do nothing: there are no streams."""

    def order_after_caller(self, event: EventHandle | None, on_comm_stream: bool) -> None:
        """Wait for the event; torch's own work is complete when its calls return."""
        if event is not None:
            event.current_stream_wait()

    def order_caller_after(
        self, tensors: Sequence[torch.Tensor | None], async_finish: bool, on_comm_stream: bool
    ) -> EventHandle:
        """Do nothing: the Buffer waits for its kernels itself."""
        del tensors, async_finish, on_comm_stream
        return EventHandle()
