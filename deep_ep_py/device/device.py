"""Where tensors live and kernels run: what an engine asks of a device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from deep_ep_py.core.events import EventHandle
from deep_ep_py.core.native import C

Shape = tuple[int, int, int]
"""What kernels are compiled for: ranks, bytes of a row, top-k."""

Compiling = Callable[[], AbstractContextManager[None]]
"""Makes a context in which peers are told that this rank compiles."""

MakeLauncher = Callable[..., Any]
"""Makes what launches kernels on a GPU, of its context, `warps`, those of a block, `bulk_copies` and `cooperative`."""


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
    default_fabrics : tuple of str
        Those of them that are tried where the caller names none, in this order.
    gpu : str
        Names it among those of the machine's processes; empty: it is none.
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
    default_fabrics: tuple[str, ...]
    gpu: str
    poison: bool
    fresh_memory_is_slow: bool

    @property
    def comm_stream(self) -> Any:
        """torch.cuda.Stream that kernels run on, or None."""

    def refusal_of_gpu(self, gpu: str) -> str:
        """Return why this GPU and another do not use each other's memory as kernels need it; empty: they do, or this
        process does not see the other.
        """

    def blocks_for(self, moved: float) -> int:
        """Return the blocks of a kernel that reads and writes so many bytes of rows, where no Config says otherwise."""

    def default_arena_bytes(self, ranks: int, by_nics: bool) -> tuple[int, int]:
        """Return how much memory for outputs a rank takes at first, and at most, where the caller names no size;
        `by_nics`: NICs reach the heap too.
        """

    def make_heap(self, size: int, first: int, cleared: int, in_process: bool, by_nics: bool) -> C.Heap:
        """Make this rank's heap, of at least `size` bytes once it has grown, of which the first are there at once.

        The first `cleared` bytes, the header and the signal words, are zero before any peer can reach them. Nothing may
        be assumed of the others.
        """

    def map_heap(self, descriptor: int, size: int, first: int, by_nics: bool) -> C.Heap:
        """Map a peer's heap."""

    def make_copy(self, size: int) -> C.Heap:
        """Make zeroed memory for a copy of the first bytes of a heap that cannot be mapped."""

    def make_runtime(self, options: C.BufferOptions, heaps: list[C.Heap], network: C.NetworkOptions) -> C.Runtime:
        """Make what launches kernels; `network`: how ranks that are not mapped are reached."""

    def allocate(
        self, runtime: C.Runtime, shape: tuple[int, ...], dtype: torch.dtype, grows: bool
    ) -> torch.Tensor | None:
        """Make a tensor, not empty, in a runtime's memory for outputs, which peers see; None where there is no room.
        Then that memory may grow, for later tensors, if it `grows`.
        """

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

    def callers_stream(self) -> Callable[[], AbstractContextManager[Any]]:
        """Return what makes a context in which the caller's work goes, also later, to where it goes now."""

    def order_after_caller(self, event: EventHandle | None, on_comm_stream: bool) -> None:
        """Let the kernels launched next wait for the event and, unless `on_comm_stream`, for all that the caller has
        queued.
        """

    def order_caller_after(
        self, tensors: Sequence[torch.Tensor | None], async_finish: bool, on_comm_stream: bool
    ) -> EventHandle:
        """Let the caller's next work wait for the kernels launched so far; if `async_finish` only for the event that is
        returned, and keep the memory of `tensors`, which these kernels use, from being reused before.
        """
