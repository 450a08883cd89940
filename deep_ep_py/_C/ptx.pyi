# Written by `make stubs` from the bindings in csrc/python: change those.
"""
An interpreter of the PTX that the compiler emits.
"""

from __future__ import annotations
import deep_ep_py._C
import typing

__all__: list[str] = [
    "Image",
    "InstructionCount",
    "KernelCount",
    "Kernels",
    "LaunchTime",
    "NIC_PLACE",
    "PtxError",
    "add_heap",
    "count",
    "counted",
    "run",
    "time",
    "watch",
]

class PtxError(Exception):
    pass

class Image:
    """
    A PTX module.
    """
    def __init__(self, text: str) -> None: ...
    @property
    def instructions(self) -> int: ...

class LaunchTime:
    """
    The time of a launch, and its longest path.
    """
    @property
    def barriers(self) -> int:
        """
        Of a block.
        """
    @property
    def begin(self) -> float:
        """
        In cycles of the modeled GPUs.
        """
    @property
    def blocks(self) -> int: ...
    @property
    def cycles_by_place(self) -> dict[int, float]:
        """
        The cycles of the path, by InstructionCount.place_number.
        """
    @property
    def end(self) -> float: ...
    @property
    def fences(self) -> int:
        """
        At device and system scope.
        """
    @property
    def instructions(self) -> int: ...
    @property
    def nic_bytes(self) -> int:
        """
        That the rank's NICs have sent meanwhile.
        """
    @property
    def own_bytes(self) -> int:
        """
        Bytes of rows that it loads from or stores into memory of its rank.
        """
    @property
    def peer_bytes(self) -> int: ...
    @property
    def rank(self) -> int: ...
    @property
    def thread_instructions(self) -> int:
        """
        Of all threads.
        """
    @property
    def waits(self) -> int:
        """
        For data from global memory.
        """

class KernelCount:
    """
    Counts of what a kernel has executed, over all its launches.
    """
    @property
    def blocks(self) -> int: ...
    @property
    def launches(self) -> int:
        """
        On one rank each.
        """
    @property
    def max_block_barriers(self) -> int:
        """
        The most of any thread.
        """
    @property
    def row_bytes(self) -> int:
        """
        Bytes of loads of at least 16 bytes from global memory.
        """
    @property
    def row_trips(self) -> int:
        """
        How often warps have waited for such loads.
        """
    @property
    def times(self) -> list[LaunchTime]:
        """
        Of its launches, in the order in which they began.
        """
    @property
    def warps(self) -> int: ...

class InstructionCount:
    """
    Counts of an instruction: its executions and its memory traffic.
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
        The line of the PTX.
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
        The place in the sources, and where it was inlined.
        """
    @property
    def place_number(self) -> int: ...
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

class Kernels(deep_ep_py._C.KernelSource):
    """
    Kernels that a Runtime launches instead of those compiled into the extension.
    """
    def __init__(self, copy_piece: int, warps: int) -> None: ...
    def add(self, name: str, shape: tuple[int, int, int], symbol: str, image: Image) -> None: ...
    def has(self, name: str, shape: tuple[int, int, int]) -> bool: ...

def add_heap(base: int, bytes: int, rank: int) -> None:
    """
    Declare memory of a rank that kernels of several ranks use.
    """

def count(on: bool) -> None:
    """
    Start counting what kernels execute, from zero, or stop.
    """

def counted() -> dict[str, tuple[KernelCount, list[InstructionCount]]]:
    """
    Return the counts of each kernel, by symbol: in total and per instruction.
    """

def run(image: Image, symbol: str, *, blocks: int = 1, threads: int = 32, shared_bytes: int = 0, args: bytes) -> None:
    """
    Run a kernel of a module on its own. `args`: the bytes of its parameters.
    """

def time(*, one_gpu: bool, counts: bool, nic: float = 0.0) -> None:
    """
    Start predicting how long kernels take, from zero, until count(False). Threads are scheduled by the time that they have spent, and deadlines never pass. `one_gpu`: on a GPU that all ranks share. `counts`: also do what count(True) does, which takes most of the memory. `nic`: bytes per second that the NICs of a rank send; 0: any number.
    """

def watch(on: bool, *, seed: int = 0) -> None:
    """
    Start watching the order of kernels' memory accesses afresh, or stop. The seed decides which loads of words return old values; 0: none does.
    """

NIC_PLACE: int = 4294967295
