"""Small straight-line programs of a few threads, and the outcomes that they must never have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

CTA, GPU, SYS = "cta", "gpu", "sys"


@dataclass(frozen=True)
class Instruction:
    """One operation. `order`: weak, relaxed, acquire, release or acq_rel; `scope`: for a strong one."""

    kind: str  # load, store, add, fence, barrier
    place: str = ""
    value: int | str = 0  # a number, or a register loaded before
    register: str = ""
    order: str = "weak"
    scope: str = ""
    barrier: int = 0


@dataclass(frozen=True)
class Thread:
    """A thread's instructions, and where it runs: the host and each NIC are separate devices."""

    device: str
    block: int
    instructions: tuple[Instruction, ...]


@dataclass(frozen=True)
class Program:
    """Threads that start together, with all memory zero except for `initial`."""

    threads: tuple[Thread, ...]
    initial: dict[str, int] = field(default_factory=dict)


Outcome = dict[str, int]
"""By register name; each is loaded once, by one thread."""


@dataclass(frozen=True)
class Litmus:
    """An idiom of the code, and variants of it that each lack a part.

    Parameters
    ----------
    name
        As cited in csrc/ comments.
    what
        What it communicates, between which threads.
    program
        The idiom.
    never
        The outcome that it must rule out.
    broken
        Variants by their defect, each of which allows that outcome.
    """

    name: str
    what: str
    program: Program
    never: Callable[[Outcome], bool]
    broken: dict[str, Program]


def thread(device: str, block: int, *instructions: Instruction) -> Thread:
    """Make a thread."""
    return Thread(device, block, instructions)


def load(register: str, place: str, order: str = "weak", scope: str = "") -> Instruction:
    """Load into a register."""
    return Instruction("load", place, 0, register, order, scope)


def store(place: str, value: int | str, order: str = "weak", scope: str = "") -> Instruction:
    """Store a number, or the value of a register."""
    return Instruction("store", place, value, "", order, scope)


def add(register: str, place: str, value: int, order: str, scope: str) -> Instruction:
    """Add atomically; the register receives the previous value."""
    return Instruction("add", place, value, register, order, scope)


def fence(scope: str) -> Instruction:
    """Order what precedes it before what follows: fence.acq_rel."""
    return Instruction("fence", order="acq_rel", scope=scope)


def barrier(number: int) -> Instruction:
    """Meet the other threads of the block that have this barrier: bar.sync or bar.warp.sync."""
    return Instruction("barrier", barrier=number)
