# Written by `make stubs` from the bindings in csrc/python: change those.
"""
NVSHMEM's queue pairs and its symmetric heap.
"""

from __future__ import annotations
import collections.abc
import deep_ep_py._C
import deep_ep_py._C.cuda
import typing

__all__: list[str] = [
    "Counts",
    "IBGDA_STATE_BYTES",
    "INITIALIZED",
    "Lease",
    "LoadedModule",
    "QUEUE_PAIRS_OF_ONES_OWN_SINCE",
    "Refused",
    "STATE_BYTES",
    "Wanted",
    "check",
    "heap_of",
    "lease",
    "shared_queues",
    "version",
]

class Refused(Exception):
    pass

class Wanted:
    """
    The queue pairs of NVSHMEM that a Buffer adopts, and the part of its heap that it uses.
    """
    def __init__(
        self,
        *,
        version: int,
        device_state: bytes,
        ibgda_state: bytes,
        pes: collections.abc.Sequence[int],
        reached: collections.abc.Sequence[bool],
        rank: int,
        heap_offset: int,
        heap_bytes: int,
        queues: int,
        handles: collections.abc.Sequence[int],
        counts: int,
    ) -> None: ...

class Counts:
    """
    Counters of what kernels post to dedicated queue pairs.
    """
    def __init__(self, context: deep_ep_py._C.cuda.Context, pes: int, queues: int) -> None: ...
    @property
    def address(self) -> int: ...

class LoadedModule:
    """
    A module that was loaded for its symbols.
    """
    def __init__(self, context: deep_ep_py._C.cuda.Context, image: bytes) -> None: ...
    def read(self, symbol: str) -> bytes:
        """
        Return the contents of a symbol.
        """
    @property
    def handle(self) -> int: ...

class Lease:
    """
    A heap in memory that was allocated elsewhere.
    """
    def take(self) -> deep_ep_py._C.Heap:
        """
        Return the heap, once; afterwards the lease does not keep it in use.
        """
    @property
    def ended(self) -> bool:
        """
        Whether nothing uses it any longer, neither its Buffer nor an output.
        """

def check(context: deep_ep_py._C.cuda.Context, wanted: Wanted) -> None:
    """
    Raise Refused, with what to change, if the queue pairs cannot be adopted. Does not check the heap.
    """

def heap_of(device_state: bytes) -> int:
    """
    Return where this PE's symmetric heap begins; 0: NVSHMEM has not filled in the state.
    """

def lease(context: deep_ep_py._C.cuda.Context, address: int, bytes: int, cleared: int) -> Lease:
    """
    Make a heap at an address of GPU memory, whose first `cleared` bytes are set to 0.
    """

def shared_queues(version: int, ibgda_state: bytes) -> tuple[int, int]:
    """
    Return how many NICs NVSHMEM uses, and how many queue pairs to each PE its kernels share on each NIC.
    """

def version(major: int, minor: int, patch: int) -> int:
    """
    Return a version as a number, in the order of releases.
    """

IBGDA_STATE_BYTES: int = 8384
INITIALIZED: int = 2
QUEUE_PAIRS_OF_ONES_OWN_SINCE: int = 3150848
STATE_BYTES: int = 776
