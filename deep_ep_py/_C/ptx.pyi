# Written by `make stubs` from the bindings in csrc/python: change those.
"""
The compiler's PTX, interpreted.
"""

from __future__ import annotations
import typing

__all__: list[str] = ["Image", "KernelSource", "Kernels", "PtxError", "add_heap", "run", "watch"]

class PtxError(Exception):
    pass

class Image:
    """
    A module of PTX.
    """
    def __init__(self, text: str) -> None: ...
    @property
    def instructions(self) -> int: ...

class KernelSource:
    pass

class Kernels(KernelSource):
    """
    Kernels that a Runtime launches instead of its own.
    """
    def __init__(self, bulk_copies: bool) -> None: ...
    def add(self, name: str, shape: tuple[int, int, int], symbol: str, image: Image) -> None: ...
    def has(self, name: str, shape: tuple[int, int, int]) -> bool: ...

def add_heap(base: int, bytes: int) -> None:
    """
    Name memory that several ranks' kernels use.
    """

def run(image: Image, symbol: str, *, blocks: int = 1, threads: int = 32, shared_bytes: int = 0, args: bytes) -> None:
    """
    Run a kernel of a module by itself, whose parameters are these bytes.
    """

def watch(on: bool, *, seed: int = 0) -> None:
    """
    Begin to watch the order of kernels' accesses to memory, with nothing known of any, or cease to. From the seed is drawn which loads of words return old values; 0: none does.
    """
