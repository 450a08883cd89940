# Written by `make stubs` from the bindings in csrc/python: change those.
"""
GPUs through the CUDA driver, which is opened on first use.
"""

from __future__ import annotations
import collections.abc
import deep_ep_py._C
import typing

__all__: list[str] = [
    "BLOCK_WARPS",
    "Context",
    "ContextScope",
    "GatheredLauncher",
    "Gathering",
    "Launcher",
    "Memory",
    "Peer",
    "PinnedWords",
    "PoolScope",
    "StreamLauncher",
    "copies_bytes",
    "driver_version",
    "make_heap",
    "make_runtime",
    "map_heap",
    "pin_heap",
    "pool_over",
]

class ContextScope:
    def __enter__(self) -> None: ...
    def __exit__(self, *args) -> None: ...

class Peer:
    """
    How the kernels of each of two GPUs may access the memory of the other.
    """
    @property
    def access(self) -> bool:
        """
        By loads and stores.
        """
    @property
    def native_atomics(self) -> bool:
        """
        Also by atomics that are atomic with those of the other GPU.
        """

class Context:
    def __init__(self, ordinal: int) -> None: ...
    def current(self) -> ContextScope:
        """
        Return a context manager in whose body the context is current on this thread.
        """
    def owns(self, address: int) -> bool:
        """
        Return whether memory at an address belongs to this GPU.
        """
    def peer(self, uuid: str) -> Peer | None:
        """
        Return how this GPU and another may access each other's memory; None if this process does not see the other.
        """
    @property
    def architecture(self) -> str: ...
    @property
    def may_have_mps(self) -> bool: ...
    @property
    def multiprocessors(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def orders_nic_writes(self) -> bool:
        """
        Whether its running kernels see the writes of a NIC in order.
        """
    @property
    def ordinal(self) -> int: ...
    @property
    def uuid(self) -> str:
        """
        32 hexadecimal digits that no other GPU has.
        """

class PoolScope:
    def __enter__(self) -> None: ...
    def __exit__(self, *args) -> None: ...

class PinnedWords:
    """
    Words in host memory that kernels and the host access concurrently.
    """
    def add(self, index: int, times: int) -> None:
        """
        Add 1 `times` times.
        """
    def address(self, arg0: int) -> int: ...
    def exchange(self, index: int, value: int) -> int:
        """
        Return the value before.
        """
    def load(self, index: int) -> int: ...
    def store(self, index: int, value: int) -> None: ...

class Memory:
    def __init__(self, context: Context) -> None: ...
    def load_word(self, arg0: int) -> int: ...
    def pinned_words(self, count: int) -> PinnedWords:
        """
        Allocate zeroed words.
        """
    def store_words(self, arg0: collections.abc.Sequence[int], arg1: int) -> None: ...

class StreamLauncher:
    def finished(self, serial: int) -> bool: ...
    def keep_stream(self) -> None:
        """
        From now on the stream outlives the launcher, since tensors that were used on it may.
        """
    def launch(
        self, name: str, shape: tuple[int, int, int], blocks: int, warps: int, shared_bytes: int, args: str
    ) -> int: ...
    def load(self, name: str, shape: tuple[int, int, int], cubin: bytes, symbol: str) -> None: ...
    def loaded(self, name: str, shape: tuple[int, int, int]) -> bool: ...
    def wait(self, serial: int) -> None:
        """
        Wait until nothing runs on the launcher's own stream.
        """
    @property
    def max_shared_bytes(self) -> int:
        """
        The most dynamic shared memory that a block of any kernel may have.
        """
    @property
    def stream(self) -> int:
        """
        The launcher's own stream, as an integer.
        """

class Launcher(StreamLauncher):
    def __init__(
        self, context: Context, sharers: int = 1, warps: int = 16, copy_piece: int = 0, cooperative: bool = True
    ) -> None: ...
    def launch_on(self, stream: int | None, ends: bool = False) -> None:
        """
        Select the stream of the launches that follow; None: the launcher's own. Kernels run in the order of their launches, also on different streams. `ends`: the stream may be destroyed before the next launch.
        """
    def max_blocks(self, name: str, shape: tuple[int, int, int], warps: int, shared_bytes: int) -> int: ...
    def share(self, sharers: int) -> None:
        """
        Change the number of sharers, before a kernel is loaded.
        """
    def take_launch_times(self) -> list[tuple[str, float, float]]:
        """
        Wait for the timed launches since the last call, and return of each the kernel, and when it began and ended, in milliseconds since the first one began.
        """
    def time_launches(self, timed: bool) -> None:
        """
        From now on, record an event right before and right after every launch, or no longer.
        """

class Gathering:
    """
    Combines the launches of several ranks into one.
    """
    def __init__(
        self, context: Context, ranks: int, warps: int = 16, copy_piece: int = 0, cooperative: bool = True
    ) -> None: ...
    def leave(self, rank: int) -> None:
        """
        Make no rank wait any longer for this one, which will not arrive.
        """

class GatheredLauncher(StreamLauncher):
    def __init__(self, gathering: Gathering, rank: int, timeout: float) -> None: ...

def copies_bytes(copy_piece: int) -> int: ...
def driver_version() -> int:
    """
    Return the CUDA version that the driver supports, for example 13000.
    """

def make_heap(context: Context, bytes: int, first: int, cleared: int, exported: bool) -> deep_ep_py._C.Heap:
    """
    Make this rank's heap on a GPU. Its first `first` bytes are backed by memory at once, the first `cleared` of them zeroed; if `exported` it has a descriptor, for map_heap.
    """

def make_runtime(
    options: deep_ep_py._C.BufferOptions,
    heaps: collections.abc.Sequence[deep_ep_py._C.Heap],
    near: collections.abc.Sequence[deep_ep_py._C.Heap | None],
    network: deep_ep_py._C.NetworkOptions,
    context: Context,
    launcher: StreamLauncher,
) -> deep_ep_py._C.Runtime:
    """
    Make a Runtime whose kernels the launcher runs; it looks them up there when it needs them. If some rank is not mapped, all heaps must be in host memory and pinned, since NICs are host threads; their near parts are then in memory of the GPUs, None where it is not mapped here.
    """

def map_heap(context: Context, descriptor: int, bytes: int, first: int) -> deep_ep_py._C.Heap: ...
def pin_heap(context: Context, heap: deep_ep_py._C.Heap) -> None:
    """
    Let the GPU access a heap in host memory, own or mapped, at its address, for the lifetime of the heap.
    """

def pool_over(runtime: deep_ep_py._C.Runtime, grows: bool) -> PoolScope:
    """
    Return a context manager in whose body deep_ep_pool_allocate, on this thread, takes memory from the runtime's arena. `grows`: the arena may grow.
    """

BLOCK_WARPS: int = 16
