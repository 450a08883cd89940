# Written by `make stubs` from the bindings in csrc/python: change those.
"""
The compiler's PTX, interpreted.
"""

from __future__ import annotations
import typing

__all__: list[str] = [
    "Image",
    "InstructionCount",
    "KernelCount",
    "KernelSource",
    "Kernels",
    "PtxError",
    "add_heap",
    "count",
    "counted",
    "run",
    "watch",
]

class PtxError(Exception):
    pass

class Image:
    """
    A module of PTX.
    """
    def __init__(self, text: str) -> None: ...
    @property
    def instructions(self) -> int: ...

class KernelCount:
    """
    What a kernel has executed, in all its launches.
    """
    @property
    def blocks(self) -> int: ...
    @property
    def launches(self) -> int:
        """
        Of a rank.
        """
    @property
    def max_block_barriers(self) -> int:
        """
        Of a thread.
        """
    @property
    def row_bytes(self) -> int:
        """
        What warps have loaded by 16 bytes and more from global memory.
        """
    @property
    def row_trips(self) -> int:
        """
        How often warps have waited for some of it.
        """
    @property
    def warps(self) -> int: ...

class InstructionCount:
    """
    How often an instruction has been executed, and what it took.
    """
    @property
    def bytes(self) -> int: ...
    @property
    def file(self) -> str: ...
    @property
    def file_line(self) -> int: ...
    @property
    def line(self) -> int:
        """
        Of the PTX.
        """
    @property
    def min_wavefronts(self) -> int: ...
    @property
    def opcode(self) -> str: ...
    @property
    def peer_bytes(self) -> int: ...
    @property
    def peer_sectors(self) -> int: ...
    @property
    def place(self) -> str:
        """
        In the sources, and where it was inlined.
        """
    @property
    def sectors(self) -> int: ...
    @property
    def threads(self) -> int: ...
    @property
    def trip_bytes(self) -> int: ...
    @property
    def trips(self) -> int: ...
    @property
    def warps(self) -> int: ...
    @property
    def wavefronts(self) -> int: ...

class KernelSource:
    pass

class Kernels(KernelSource):
    """
    Kernels that a Runtime launches instead of its own.
    """
    def __init__(self, bulk_copies: bool, warps: int) -> None: ...
    def add(self, name: str, shape: tuple[int, int, int], symbol: str, image: Image) -> None: ...
    def has(self, name: str, shape: tuple[int, int, int]) -> bool: ...

def add_heap(base: int, bytes: int, rank: int) -> None:
    """
    Name memory of a rank's that several ranks' kernels use.
    """

def count(on: bool) -> None:
    """
    Begin to count what kernels execute, from nothing, or cease to.
    """

def counted() -> dict[str, tuple[KernelCount, list[InstructionCount]]]:
    """
    What has been counted: by kernels' symbols, in all and by instruction.
    """

def run(image: Image, symbol: str, *, blocks: int = 1, threads: int = 32, shared_bytes: int = 0, args: bytes) -> None:
    """
    Run a kernel of a module by itself, whose parameters are these bytes.
    """

def watch(on: bool, *, seed: int = 0) -> None:
    """
    Begin to watch the order of kernels' accesses to memory, with nothing known of any, or cease to. From the seed is drawn which loads of words return old values; 0: none does.
    """
