"""The interface through which an engine uses a device, where tensors live and kernels run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from deep_ep_py.base.events import EventHandle
from deep_ep_py.base.gpus import GpuAnswer
from deep_ep_py.base.native import C

Shape = tuple[int, int, int]
"""The values that kernels are compiled for: ranks, bytes of a row, top-k."""

Compiling = Callable[[], AbstractContextManager[None]]
"""Makes a context during which peers are notified that this rank is compiling."""

MakeLauncher = Callable[..., Any]
"""Makes a GPU's kernel launcher from its context, `warps` (of a block), `copy_piece` and `cooperative`."""


class Device(Protocol):
    """A device.

    Attributes
    ----------
    torch_device : torch.device
        The device of tensors.
    asynchronous : bool
        Whether the call of an operation returns before its kernels have ended, even without `async_finish`.
    blocks : int
        Thread blocks of a kernel that moves no rows; for the other kernels see `blocks_for`.
    calls : int
        Operations of a Buffer that are expected to be in flight at once.
    fabrics : tuple of str
        The fabrics by which ranks on such devices may reach each other.
    default_fabrics : tuple of str
        The fabrics that are tried, in this order, if the caller names none.
    gpu : str
        Identifies the GPU among those of the machine's processes; empty if the device is not a GPU.
    poison : bool
        Whether memory may be filled with a pattern before it is written, to expose reads of unwritten memory.
    maps_all : bool
        Whether every process of a machine can map another's memory.
    fresh_memory_is_slow : bool
        Whether even outputs that no peer uses should come from the heap, whose pages already exist.
    """

    torch_device: torch.device
    asynchronous: bool
    blocks: int
    calls: int
    fabrics: tuple[str, ...]
    default_fabrics: tuple[str, ...]
    gpu: str
    poison: bool
    maps_all: bool
    fresh_memory_is_slow: bool

    @property
    def comm_stream(self) -> Any:
        """The torch.cuda.Stream that kernels run on unless they run on the caller's, or None."""

    def profiler_range(self, name: str) -> Callable[[], None] | None:
        """Open a range in the device's profiler, and return what closes it; None if it has no such profiler."""

    def share(self, ranks: int) -> None:
        """Limit launches, before the first, so that so many ranks' kernels, which wait for each other, fit at once."""

    def answer_about(self, gpu: str) -> GpuAnswer:
        """Return whether this GPU and another of this machine use each other's memory as kernels need it."""

    def blocks_for(self, moved: float) -> int:
        """Return the blocks for a kernel that reads and writes `moved` bytes of rows, unless a Config sets them."""

    def default_arena_bytes(self, ranks: int, by_nics: bool) -> tuple[int, int]:
        """Return the initial and the maximum size of a rank's memory for outputs, if the caller names none.

        `by_nics`: NICs reach the heap too.
        """

    def check_arena_bytes(self, arena_bytes: int) -> None:
        """Refuse a size that the device cannot have, by a ValueError that names `arena_bytes`."""

    def room_for_regions(self, in_process: bool) -> int | None:
        """Return the bytes that are free for rows in transit of all ranks, if a pattern is written over all of them.

        None: no pattern is written.
        """

    def make_heap(self, size: int, first: int, cleared: int, in_process: bool, by_nics: bool) -> C.Heap:
        """Make this rank's heap: at least `size` bytes once it has grown, of which the `first` exist from the start.

        The first `cleared` bytes, the header and the signal words, are zero before any peer can reach them. Nothing may
        be assumed about the rest.
        """

    def map_heap(self, descriptor: int, size: int, first: int, by_nics: bool) -> C.Heap:
        """Map a peer's heap."""

    def make_copy(self, size: int) -> C.Heap:
        """Allocate zeroed memory for a copy of the first bytes of a heap that cannot be mapped."""

    def make_runtime(
        self, options: C.BufferOptions, heaps: list[C.Heap], near: list[C.Heap | None], network: C.NetworkOptions
    ) -> C.Runtime:
        """Make the runtime, which launches kernels.

        `near`: the near parts of the heaps, None where they are not reached from here; empty if they are in the heaps.
        `network`: how ranks that are not mapped are reached.
        """

    def allocate(
        self, runtime: C.Runtime, shape: tuple[int, ...], dtype: torch.dtype, grows: bool
    ) -> torch.Tensor | None:
        """Allocate a non-empty tensor in a runtime's memory for outputs, which peers see.

        Returns None if there is no room; with `grows` that memory may then grow for later tensors.
        """

    def view(self, address: int, size: int) -> torch.Tensor:
        """Return bytes of a heap as a tensor, which does not keep them alive."""

    def prepare(self, kernels: Iterable[str], shape: Shape, compiling: Compiling) -> None:
        """Get kernels ready, in the context of `compiling` if that takes time.

        Nothing may be loaded once an operation has begun.
        """

    def copy(self, target: torch.Tensor, source: torch.Tensor, ranks: int) -> None:
        """Copy a contiguous tensor into another of its size as the caller's next work, while all `ranks` ranks do."""

    def capturing(self) -> bool:
        """Return whether the caller's work is being captured into a graph, to run later."""

    def synchronize(self) -> None:
        """Wait until all kernels on the device have ended."""

    def allocating(self, on_comm_stream: bool) -> AbstractContextManager[Any]:
        """Return a context for allocating tensors.

        With `on_comm_stream` their first use is by the kernels, otherwise by the caller's own work.
        """

    def callers_stream(self) -> Callable[[], AbstractContextManager[Any]]:
        """Return a factory of contexts in which the caller's work goes, even later, to where it goes now."""

    def launch_on_callers_stream(self) -> None:
        """Launch the next kernels between the work that the caller has queued and what it queues later."""

    def order_after_caller(self, event: EventHandle | None, on_comm_stream: bool) -> None:
        """Launch the next kernels on the communication stream, and make them wait for the event.

        Unless `on_comm_stream`, they also wait for all work that the caller has queued.
        """

    def order_caller_after(
        self, tensors: Sequence[torch.Tensor | None], async_finish: bool, on_comm_stream: bool
    ) -> EventHandle:
        """Make the caller's next work wait for the kernels launched so far.

        With `async_finish` only the returned event waits for them, and the memory of `tensors`, which these kernels
        use, is not reused before that.
        """
