"""The CPU as a device: kernels run on the executor, tensors lie in memory that the ranks share."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
import torch.utils.dlpack

from deep_ep_py.core.events import EventHandle
from deep_ep_py.core.native import C
from deep_ep_py.device.device import Compiling, Shape

_DLPACK_TYPES = {
    torch.bfloat16: (4, 16),
    torch.float32: (2, 32),
    torch.int64: (0, 64),
    torch.int32: (0, 32),
    torch.uint8: (1, 8),
}
"""Type code and bits, as DLPack has them."""


@cache
def _carried(dtype: torch.dtype) -> tuple[torch.dtype, int, int]:
    """Return the type that tensors of a type are handed over as, with its code and bits.

    Not every torch takes FP8 by DLPack: types of one byte come as uint8, those of two as bfloat16.
    """
    carried = {1: torch.uint8, 2: torch.bfloat16}.get(dtype.itemsize, dtype)
    return carried, *_DLPACK_TYPES[carried]


class CpuDevice:
    """The CPU: kernels run as fibers, in a thread that waits for them: the caller's, or a Driver's."""

    torch_device = torch.device("cpu")
    asynchronous = False
    blocks = 1  # one thread runs them all
    calls = 2
    fabrics: tuple[str, ...] = ("peer", "ibgda", "weak", "mixed", "proxy")
    default_fabrics: tuple[str, ...] = ("peer", "ibgda", "proxy")
    gpu = ""
    poison = True
    fresh_memory_is_slow = True
    comm_stream = None

    def default_arena_bytes(self, ranks: int, by_nics: bool) -> tuple[int, int]:
        """Half the machine's memory, divided among the ranks. Pages that are never touched cost nothing."""
        del by_nics
        share = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // (2 * ranks)
        return share, share

    def make_heap(self, size: int, first: int, cleared: int, in_process: bool, by_nics: bool) -> C.Heap:
        """Plain memory in one process, nameless shared memory between several. New pages are zero."""
        del first, cleared, by_nics
        return C.Heap.make_plain(size) if in_process else C.Heap.make_shared(size)

    def map_heap(self, descriptor: int, size: int, first: int, by_nics: bool) -> C.Heap:
        """Map the same memory."""
        del first, by_nics
        return C.Heap.map(descriptor, size)

    def make_copy(self, size: int) -> C.Heap:
        """Plain memory."""
        return C.Heap.make_plain(size)

    def make_runtime(self, options: C.BufferOptions, heaps: list[C.Heap], network: C.NetworkOptions) -> C.Runtime:
        """Make one over the executor."""
        return C.Runtime(options, heaps, network)

    def refusal_of_gpu(self, gpu: str) -> str:
        """See `Device`: nothing is asked."""
        del gpu
        return ""

    def blocks_for(self, moved: float) -> int:
        """One, for any call."""
        del moved
        return self.blocks

    def allocate(
        self, runtime: C.Runtime, shape: tuple[int, ...], dtype: torch.dtype, grows: bool
    ) -> torch.Tensor | None:
        """Straight from the arena, which gets the memory back with the last reference: that is the last use."""
        del grows  # it is all there
        carried, code, bits = _carried(dtype)
        capsule = runtime.allocate(shape, code, bits)
        if capsule is None:
            return None
        tensor = torch.utils.dlpack.from_dlpack(capsule)
        return tensor if carried is dtype else tensor.view(dtype)

    def view(self, address: int, size: int) -> torch.Tensor:
        """Through a C array at that address."""
        if size == 0:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        return torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8)

    def prepare(self, kernels: Iterable[str], shape: Shape, compiling: Compiling) -> None:
        """Nothing: they are part of the extension, for any shape."""

    def copy(self, target: torch.Tensor, source: torch.Tensor, ranks: int) -> None:
        """Past the caches where all ranks' copies would not fit into them."""
        streaming = source.nbytes * ranks > C.STREAMING_THRESHOLD
        C.copy_row_to_many([target.data_ptr()], source.data_ptr(), source.nbytes, streaming)

    def capturing(self) -> bool:
        """Never."""
        return False

    def synchronize(self) -> None:
        """Nothing: no graphs are replayed."""

    def allocating(self, on_comm_stream: bool) -> AbstractContextManager[Any]:
        """Nothing: there are no streams."""
        del on_comm_stream
        return nullcontext()

    def callers_stream(self) -> Callable[[], AbstractContextManager[Any]]:
        """Nothing: there are no streams."""
        return nullcontext

    def order_after_caller(self, event: EventHandle | None, on_comm_stream: bool) -> None:
        """Wait for the event; torch has done what it was asked when it returns."""
        if event is not None:
            event.current_stream_wait()

    def order_caller_after(
        self, tensors: Sequence[torch.Tensor | None], async_finish: bool, on_comm_stream: bool
    ) -> EventHandle:
        """Nothing: the Buffer waits for its kernels itself."""
        del tensors, async_finish, on_comm_stream
        return EventHandle()
