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
    Which thread waits where now.
    """

def last_stall() -> str:
    """
    Which thread waited where when the world's clock last jumped to a deadline.
    """

def new_event() -> int: ...
def now_ns() -> int:
    """
    The clock that kernels see.
    """

def set_event(event: int) -> None: ...
def set_schedule(seed: int, freeze: int = 512) -> None:
    """
    Draw the schedule of this process's kernels from a seed (0: first come, first served).
    """

def sleep(seconds: float) -> None:
    """
    Wait for so long by the clock that kernels see.
    """

def wait_event(event: int, what: str) -> None: ...
def world_abort(number: int, why: str) -> None:
    """
    Let every wait in that world raise SimtError. For a thread that is no rank's.
    """

def world_begin(ranks: int, seed: int = 0, freeze: int = 512) -> int:
    """
    Open a world of rank threads whose schedule is drawn from the seed (0: first come, first served). Return its number.
    """

def world_end(abandon: bool = False) -> dict:
    """
    Close the world after all have left: run what is still running to its end, or drop it. Return statistics.
    """

def world_enter(rank: int, number: int) -> None:
    """
    First call of a rank's thread: returns when its turn comes.
    """

def world_leave(rank: int) -> None:
    """
    Last call of a rank's thread.
    """
