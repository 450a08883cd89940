"""Where tensors live and kernels run: what an engine asks of a device."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, Protocol

import torch

from .native import C

Shape = tuple[int, int, int]
"""What kernels are compiled for: ranks, bytes of a row, top-k."""


class Device(Protocol):
    """A device.

    Attributes
    ----------
    torch_device : torch.device
        Of tensors.
    dlpack : tuple of int
        The same as DLPack has it: type and number.
    blocks : int
        Of a kernel where no Config says otherwise.
    fabrics : tuple of str
        How ranks on such devices may reach each other.
    poison : bool
        Whether memory may be filled with a pattern before it is written, to make reading it unwritten show.
    """

    torch_device: torch.device
    dlpack: tuple[int, int]
    blocks: int
    fabrics: tuple[str, ...]
    poison: bool

    def default_arena_bytes(self, ranks: int) -> int:
        """Return how much memory for outputs a rank takes if nobody says."""

    def make_heap(self, size: int, in_process: bool) -> Any:
        """Make this rank's heap of at least `size` bytes."""

    def map_heap(self, descriptor: int, size: int) -> Any:
        """Map a peer's heap."""

    def make_runtime(self, options: Any, heaps: list[Any]) -> Any:
        """Make what launches kernels."""

    def prepare(self, kernels: Iterable[str], shape: Shape) -> None:
        """Have kernels ready: once an operation has begun, nothing may be loaded."""

    def settle(self) -> None:
        """Wait until what the caller has queued on the device is done: kernels may then use its tensors."""

    def copy(self, target: torch.Tensor, source: torch.Tensor, ranks: int) -> None:
        """Copy a contiguous tensor into another of its size while all `ranks` ranks do so."""


class CpuDevice:
    """The CPU: kernels run as fibers."""

    torch_device = torch.device("cpu")
    dlpack = (1, 0)
    blocks = 1  # one thread runs them all
    fabrics: tuple[str, ...] = ("peer", "weak", "mixed")
    poison = True

    def default_arena_bytes(self, ranks: int) -> int:
        """Half the machine's memory, shared out. Pages nobody touches cost nothing."""
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return memory // (2 * ranks)

    def make_heap(self, size: int, in_process: bool) -> Any:
        """Plain memory in one process, nameless shared memory between several."""
        return C.Heap.make_plain(size) if in_process else C.Heap.make_shared(size)

    def map_heap(self, descriptor: int, size: int) -> Any:
        """Map the same memory."""
        return C.Heap.map(descriptor, size)

    def make_runtime(self, options: Any, heaps: list[Any]) -> Any:
        """Make one over the executor."""
        return C.Runtime(options, heaps)

    def prepare(self, kernels: Iterable[str], shape: Shape) -> None:
        """Nothing: they are part of the extension, for any shape."""

    def settle(self) -> None:
        """Nothing: tensors are ready when torch returns."""

    def copy(self, target: torch.Tensor, source: torch.Tensor, ranks: int) -> None:
        """Past the caches where all ranks' copies would not fit into them."""
        streaming = source.nbytes * ranks > C.STREAMING_THRESHOLD
        C.copy_row_to_many([target.data_ptr()], source.data_ptr(), source.nbytes, streaming)


class CudaDevice:
    """A GPU. Kernels are compiled for the shapes in use, or come from the cache, and are launched through the driver.

    Parameters
    ----------
    device
        `torch.device("cuda", n)`.
    sharers
        Ranks of the Buffer that are on this GPU.

    Raises
    ------
    CudaError
        There is no driver, or no such GPU.
    """

    blocks = 24
    fabrics: tuple[str, ...] = ("peer",)
    poison = False

    def __init__(self, device: torch.device, sharers: int = 1) -> None:
        self.torch_device = device
        self.dlpack = (2, device.index)
        self._sharers = sharers
        self._context = C.cuda.Context(device.index)
        self._launcher = C.cuda.Launcher(self._context, sharers)

    def default_arena_bytes(self, ranks: int) -> int:
        """Return this rank's share of an eighth of the GPU's memory. It is taken at once."""
        del ranks
        return torch.cuda.get_device_properties(self.torch_device).total_memory // (8 * self._sharers)

    def make_heap(self, size: int, in_process: bool) -> Any:
        """Physical memory with a descriptor, mapped."""
        del in_process
        return C.cuda.make_heap(self._context, size)

    def map_heap(self, descriptor: int, size: int) -> Any:
        """Map the same physical memory."""
        return C.cuda.map_heap(self._context, descriptor, size)

    def make_runtime(self, options: Any, heaps: list[Any]) -> Any:
        """Make one over this device's launcher."""
        return C.cuda.make_runtime(options, heaps, self._context, self._launcher)

    def prepare(self, kernels: Iterable[str], shape: Shape) -> None:
        """Compile or find, and load, what is not loaded yet."""
        missing = [name for name in kernels if not self._launcher.loaded(name, self._key(name, shape))]
        if not missing:
            return
        from .jit import KERNELS, KernelCache
        from .jit import Shape as StaticShape

        wanted = [KERNELS[name] for name in missing]
        # Processes that start together begin with different kernels.
        found = KernelCache().get_all(wanted, StaticShape(*shape), self._context.architecture, start=os.getpid())
        for name, kernel in zip(missing, found, strict=True):
            self._launcher.load(name, self._key(name, shape), kernel.cubin, kernel.symbol)

    def settle(self) -> None:
        """Wait for the current stream."""
        torch.cuda.current_stream(self.torch_device).synchronize()

    def copy(self, target: torch.Tensor, source: torch.Tensor, ranks: int) -> None:
        """Copy on the current stream, and wait for it."""
        del ranks
        target.copy_(source)
        self.settle()

    @staticmethod
    def _key(name: str, shape: Shape) -> Shape:
        # The one kernel that is the same for all shapes.
        return (0, 0, 0) if name == "notify_cached" else shape


def make_device(device: torch.device, sharers: int) -> Device:
    """Return the device by torch's name for it; "cuda" is the current one. `sharers`: ranks that are on it."""
    if device.type == "cpu":
        return CpuDevice()
    index = device.index
    if index is None:
        index = torch.cuda.current_device() if torch.cuda.is_available() else 0
    return CudaDevice(torch.device("cuda", index), sharers)
