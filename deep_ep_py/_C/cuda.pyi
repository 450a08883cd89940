# Written by `make stubs` from the bindings in csrc/python: change those.
"""
GPUs through the driver, which is opened at the first use.
"""

from __future__ import annotations
import collections.abc
import deep_ep_py._C
import typing

__all__: list[str] = [
    "BLOCK_WARPS",
    "COPY_STAGE_BYTES",
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
    How kernels of one GPU may use the memory of another.
    """
    @property
    def access(self) -> bool:
        """
        By loads and stores.
        """
    @property
    def native_atomics(self) -> bool:
        """
        And by atomics that are atomic for the other too.
        """

class Context:
    def __init__(self, ordinal: int) -> None: ...
    def current(self) -> ContextScope:
        """
        A context manager: in its body the context is current on this thread.
        """
    def owns(self, address: int) -> bool:
        """
        Whether memory at an address is this GPU's.
        """
    def peer(self, uuid: str) -> Peer | None:
        """
        How its kernels may use another GPU's memory; None where this process does not see that GPU.
        """
    @property
    def architecture(self) -> str: ...
    @property
    def multiprocessors(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def orders_nic_writes(self) -> bool:
        """
        Whether its running kernels see a NIC's writes in order.
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
    Words in the host's memory that kernels and the host use at a time.
    """
    def add(self, index: int, times: int) -> None:
        """
        Add 1 so many times.
        """
    def address(self, arg0: int) -> int: ...
    def load(self, index: int) -> int: ...
    def store(self, index: int, value: int) -> None: ...

class Memory:
    def __init__(self, context: Context) -> None: ...
    def load_word(self, arg0: int) -> int: ...
    def pinned_words(self, count: int) -> PinnedWords:
        """
        Zeroed.
        """
    def store_words(self, arg0: collections.abc.Sequence[int], arg1: int) -> None: ...

class StreamLauncher:
    def finished(self, serial: int) -> bool: ...
    def launch(
        self, name: str, shape: tuple[int, int, int], blocks: int, warps: int, shared_bytes: int, args: str
    ) -> int: ...
    def load(self, name: str, shape: tuple[int, int, int], cubin: bytes, symbol: str) -> None: ...
    def loaded(self, name: str, shape: tuple[int, int, int]) -> bool: ...
    def wait(self, serial: int) -> None:
        """
        Return when this launch has ended.
        """
    @property
    def stream(self) -> int:
        """
        The stream that kernels run on, as an integer.
        """

class Launcher(StreamLauncher):
    def __init__(
        self, context: Context, sharers: int = 1, warps: int = 16, bulk_copies: bool = False, cooperative: bool = True
    ) -> None: ...
    def max_blocks(self, name: str, shape: tuple[int, int, int], warps: int, shared_bytes: int) -> int: ...

class Gathering:
    """
    Makes one launch of those of several ranks.
    """
    def __init__(
        self, context: Context, ranks: int, warps: int = 16, bulk_copies: bool = False, cooperative: bool = True
    ) -> None: ...
    def leave(self, rank: int) -> None:
        """
        Let no rank wait for one that will not come.
        """

class GatheredLauncher(StreamLauncher):
    def __init__(self, gathering: Gathering, rank: int, timeout: float) -> None: ...

def driver_version() -> int:
    """
    CUDA's version that the driver supports, as 13000.
    """

def make_heap(context: Context, bytes: int, first: int, cleared: int, exported: bool) -> deep_ep_py._C.Heap:
    """
    This rank's heap on a GPU, of which the first bytes are there at once, zero as far as `cleared`; if `exported` it has a descriptor, for map_heap.
    """

def make_runtime(
    options: deep_ep_py._C.BufferOptions,
    heaps: collections.abc.Sequence[deep_ep_py._C.Heap],
    network: deep_ep_py._C.NetworkOptions,
    context: Context,
    launcher: StreamLauncher,
) -> deep_ep_py._C.Runtime:
    """
    A Runtime whose kernels the launcher runs; it takes them from there as they are needed. Where some rank is not mapped, all heaps are the host's, and pinned: NICs are threads of the host.
    """

def map_heap(context: Context, descriptor: int, bytes: int, first: int) -> deep_ep_py._C.Heap: ...
def pin_heap(context: Context, heap: deep_ep_py._C.Heap) -> None:
    """
    Let the GPU use a heap of the host, own or mapped, under its address, as long as the heap lives.
    """

def pool_over(runtime: deep_ep_py._C.Runtime, grows: bool) -> PoolScope:
    """
    A context in which deep_ep_pool_allocate, on this thread, takes from the runtime's arena, which may grow.
    """

BLOCK_WARPS: int = 16
COPY_STAGE_BYTES: int = 4224
