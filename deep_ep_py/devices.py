"""Where tensors live and kernels run: what an engine asks of a device, and the CPU's answers."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
import torch.utils.dlpack

from .events import EventHandle
from .native import C

Shape = tuple[int, int, int]
"""What kernels are compiled for: ranks, bytes of a row, top-k."""

Compiling = Callable[[], AbstractContextManager[None]]
"""Makes a context in which peers are told that this rank compiles."""

MakeLauncher = Callable[..., Any]
"""Makes what launches kernels on a GPU, of its context, `warps`, those of a block, and `bulk_copies`."""

_DLPACK_TYPES = {
    torch.bfloat16: (4, 16),
    torch.float32: (2, 32),
    torch.int64: (0, 64),
    torch.int32: (0, 32),
    torch.uint8: (1, 8),
}
"""Type code and bits, as DLPack has them."""
_DLPACK_CPU = (1, 0)


class Device(Protocol):
    """A device.

    Attributes
    ----------
    torch_device : torch.device
        Of tensors.
    asynchronous : bool
        Whether an operation's call returns before its kernels have ended even without `async_finish`.
    blocks : int
        Of a kernel that moves no rows; of others see `blocks_for`.
    calls : int
        Operations of a Buffer that are expected to be on their way at once.
    fabrics : tuple of str
        How ranks on such devices may reach each other.
    poison : bool
        Whether memory may be filled with a pattern before it is written, to make reading it unwritten show.
    fresh_memory_is_slow : bool
        Whether outputs that no peer uses are better taken from the heap all the same, whose pages are there already.
    """

    torch_device: torch.device
    asynchronous: bool
    blocks: int
    calls: int
    fabrics: tuple[str, ...]
    poison: bool
    fresh_memory_is_slow: bool

    @property
    def comm_stream(self) -> Any:
        """torch.cuda.Stream that kernels run on, or None."""

    def blocks_for(self, moved: float) -> int:
        """Return the blocks of a kernel that reads and writes so many bytes of rows, where no Config says otherwise."""

    def default_arena_bytes(self, ranks: int, by_nics: bool) -> tuple[int, int]:
        """Return how much memory for outputs a rank takes at first, and at most, if nobody says; `by_nics`: NICs reach
        the heap too.
        """

    def make_heap(self, size: int, first: int, in_process: bool, by_nics: bool) -> Any:
        """Make this rank's heap, of at least `size` bytes once it has grown, of which the first are there at once."""

    def map_heap(self, descriptor: int, size: int, first: int, by_nics: bool) -> Any:
        """Map a peer's heap."""

    def make_runtime(self, options: Any, heaps: list[Any], network: Any) -> Any:
        """Make what launches kernels; `network`: how ranks that are not mapped are reached."""

    def allocate(self, runtime: Any, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        """Make a tensor, not empty, in a runtime's memory for outputs, which peers see; None where there is no room."""

    def view(self, address: int, size: int) -> torch.Tensor:
        """Return bytes of a heap as a tensor, which does not keep them."""

    def prepare(self, kernels: Iterable[str], shape: Shape, compiling: Compiling) -> None:
        """Have kernels ready, in the context of `compiling` if that takes time: once an operation has begun, nothing
        may be loaded.
        """

    def copy(self, target: torch.Tensor, source: torch.Tensor, ranks: int) -> None:
        """Copy a contiguous tensor into another of its size, as the caller's next work, while all `ranks` ranks do."""

    def capturing(self) -> bool:
        """Tell whether the caller's work goes into a graph, to be run later."""

    def synchronize(self) -> None:
        """Wait until all kernels on the device have ended."""

    def allocating(self, on_comm_stream: bool) -> AbstractContextManager[Any]:
        """Let tensors made in the body be used first by the kernels if so asked, else by the caller's own work."""

    def order_after_caller(self, event: EventHandle | None, on_comm_stream: bool) -> None:
        """Let the kernels launched next wait for the event and, unless `on_comm_stream`, for all that the caller has
        queued.
        """

    def order_caller_after(
        self, tensors: Sequence[torch.Tensor | None], async_finish: bool, on_comm_stream: bool
    ) -> EventHandle:
        """Let the caller's next work wait for the kernels launched so far; if `async_finish` only for the event that is
        returned, and then see to it that the memory of `tensors`, which these kernels use, is not given away before.
        """


def from_arena(
    runtime: Any, shape: tuple[int, ...], dtype: torch.dtype, device: tuple[int, int] = _DLPACK_CPU
) -> torch.Tensor | None:
    """Make a tensor that gives its memory back to the runtime's arena as soon as nobody refers to it."""
    # Not every torch takes FP8 by DLPack: as bytes, then.
    carried = torch.uint8 if dtype.itemsize == 1 else dtype
    capsule = runtime.allocate(list(shape), *_DLPACK_TYPES[carried], device)
    return None if capsule is None else torch.utils.dlpack.from_dlpack(capsule).view(dtype)


class CpuDevice:
    """The CPU: kernels run as fibers, in the thread that waits for them."""

    torch_device = torch.device("cpu")
    asynchronous = False
    blocks = 1  # one thread runs them all
    calls = 2
    fabrics: tuple[str, ...] = ("peer", "ibgda", "weak", "mixed")
    poison = True
    fresh_memory_is_slow = True
    comm_stream = None

    def default_arena_bytes(self, ranks: int, by_nics: bool) -> tuple[int, int]:
        """Half the machine's memory, shared out. Pages nobody touches cost nothing."""
        del by_nics
        share = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // (2 * ranks)
        return share, share

    def make_heap(self, size: int, first: int, in_process: bool, by_nics: bool) -> Any:
        """Plain memory in one process, nameless shared memory between several."""
        del first, by_nics
        return C.Heap.make_plain(size) if in_process else C.Heap.make_shared(size)

    def map_heap(self, descriptor: int, size: int, first: int, by_nics: bool) -> Any:
        """Map the same memory."""
        del first, by_nics
        return C.Heap.map(descriptor, size)

    def make_runtime(self, options: Any, heaps: list[Any], network: Any) -> Any:
        """Make one over the executor."""
        return C.Runtime(options, heaps, network)

    def blocks_for(self, moved: float) -> int:
        """One, for any call."""
        del moved
        return self.blocks

    def allocate(self, runtime: Any, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        """Straight from the arena: with the last reference goes the last use."""
        return from_arena(runtime, shape, dtype)

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


def make_device(device: torch.device, sharers: int, linked: bool, make_launcher: MakeLauncher | None = None) -> Device:
    """Return the device by torch's name for it; "cuda" is the current one.

    `sharers`: ranks that are on it; `linked`: others are elsewhere. `make_launcher`: where the sharers launch together.
    """
    if device.type == "cpu":
        return CpuDevice()
    from .cuda_device import CudaDevice

    index = device.index
    if index is None:
        index = torch.cuda.current_device() if torch.cuda.is_available() else 0
    return CudaDevice(torch.device("cuda", index), sharers, linked, make_launcher)
