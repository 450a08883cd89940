# Written by `make stubs` from the bindings in csrc/python: change those.
"""
The SIMT executor: kernels on a CPU, ranks as threads.
"""

from __future__ import annotations
import typing

__all__: list[str] = [
    "dump",
    "last_stall",
    "new_event",
    "now_ns",
    "set_event",
    "set_schedule",
    "sleep",
    "wait_event",
    "world_abort",
    "world_begin",
    "world_end",
    "world_enter",
    "world_leave",
]

def dump() -> str:
    """
    List where each thread waits now.
    """

def last_stall() -> str:
    """
    List where each thread waited when the clock of the world last jumped to a deadline of a kernel.
    """

def new_event() -> int: ...
def now_ns() -> int:
    """
    Read the clock that kernels see.
    """

def set_event(event: int) -> None: ...
def set_schedule(seed: int, freeze: int = 512) -> None:
    """
    Draw the schedule of kernels of this process from a seed (0: first come, first served).
    """

def sleep(seconds: float) -> None:
    """
    Wait for this time, by the clock that kernels see.
    """

def wait_event(event: int, what: str) -> None: ...
def world_abort(number: int, why: str) -> None:
    """
    Make every wait in that world raise SimtError. For a thread that belongs to no rank.
    """

def world_begin(ranks: int, seed: int = 0, freeze: int = 512) -> int:
    """
    Open a world of rank threads whose schedule is drawn from the seed (0: first come, first served). Return its number.
    """

def world_end(abandon: bool = False) -> dict:
    """
    Close the world after all ranks have left: complete the kernels that are still running, or drop them. Return statistics.
    """

def world_enter(rank: int, number: int) -> None:
    """
    Enter a world. The first call by the thread of a rank; returns when its turn comes.
    """

def world_leave(rank: int) -> None:
    """
    Leave the world. The last call by the thread of a rank.
    """
