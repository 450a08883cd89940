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
    Which of NVSHMEM's queue pairs a Buffer is to adopt, and for which part of its heap.
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
    Where kernels count what they post to queue pairs of one's own.
    """
    def __init__(self, context: deep_ep_py._C.cuda.Context, pes: int, queues: int) -> None: ...
    @property
    def address(self) -> int: ...

class LoadedModule:
    """
    A module that is loaded for its symbols.
    """
    def __init__(self, context: deep_ep_py._C.cuda.Context, image: bytes) -> None: ...
    def read(self, symbol: str) -> bytes:
        """
        What a symbol holds.
        """
    @property
    def handle(self) -> int: ...

class Lease:
    """
    A heap in memory that others have allocated.
    """
    def take(self) -> deep_ep_py._C.Heap:
        """
        Return the heap, once: the lease does not keep it in use.
        """
    @property
    def ended(self) -> bool:
        """
        Whether nothing uses it any more: neither its Buffer nor an output.
        """

def check(context: deep_ep_py._C.cuda.Context, wanted: Wanted) -> None:
    """
    Raise Refused, with what to change, where that cannot be adopted. Of the heap nothing is asked.
    """

def heap_of(device_state: bytes) -> int:
    """
    Where this PE's symmetric heap begins; 0: NVSHMEM has filled in nothing.
    """

def lease(context: deep_ep_py._C.cuda.Context, address: int, bytes: int, cleared: int) -> Lease:
    """
    A heap at an address of the GPU's memory, whose first bytes are set to 0.
    """

def shared_queues(version: int, ibgda_state: bytes) -> tuple[int, int]:
    """
    How many NICs NVSHMEM uses, and how many queue pairs to each PE its kernels share on each.
    """

def version(major: int, minor: int, patch: int) -> int:
    """
    As a number, in the order of releases.
    """

IBGDA_STATE_BYTES: int = 8384
INITIALIZED: int = 2
QUEUE_PAIRS_OF_ONES_OWN_SINCE: int = 3150848
STATE_BYTES: int = 776
