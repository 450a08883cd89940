"""PTX of our kernels, and the number of dependent memory loads on a path through it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from deep_ep_py.device.jit import KERNELS, Shape
from deep_ep_py.device.jit.ptx import compile_ptx

_ENTRY = re.compile(r"\.entry [^{]*\n\{\n.*?\n\n\}", re.DOTALL)  # a brace of inline PTX follows no empty line
_LOCATION = re.compile(r"^\s*\.loc\s.*\n", re.MULTILINE)
_REGISTER = re.compile(r"%[A-Za-z]\w*")
_STATEMENT = re.compile(r"\s*(?:(?P<label>\$\w+):|[{}]|(?P<line>(?:[^;{}]|\{[^{};]*\})+;))")
# Loads that memory does not serve: launch arguments, a thread's own variables, shared memory.
_NEAR = ("ld.param", "ld.local", "ld.shared", "ld.const")


def ptx_of(name: str, shape: Shape, architecture: str) -> str:
    """Return the text of a kernel's entry as NVRTC generates it, without line information."""
    text, _ = compile_ptx(KERNELS[name], shape, architecture)
    entry = _ENTRY.search(_LOCATION.sub("", text))
    assert entry, "the text has no entry"
    return entry[0]


@dataclass(frozen=True)
class Instruction:
    """One line: `opcode`, the registers it writes and reads, its predicate, the label it jumps to."""

    opcode: str
    writes: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    predicate: str = ""
    target: str = ""

    @property
    def waits_for_memory(self) -> bool:
        return self.opcode.startswith(("ld.", "atom")) and not self.opcode.startswith(_NEAR)

    @property
    def is_barrier(self) -> bool:
        return self.opcode.startswith(("bar.", "barrier."))


def _instruction(line: str) -> Instruction:
    found = re.match(r"(?:@!?(%\w+)\s+)?([\w.:]+)\s*(.*);$", line)
    assert found, line
    predicate, opcode, operands = found[1] or "", found[2], found[3]
    if opcode.startswith("bra"):
        return Instruction("bra", (), (), predicate, operands.strip())
    if opcode.startswith(("st.", "red.")) or opcode in ("ret", "exit") or opcode.startswith("call"):
        return Instruction(opcode, (), tuple(_REGISTER.findall(operands)), predicate)
    head = re.match(r"\{[^}]*\}|[^,]*", operands)
    assert head
    written, rest = head[0], operands[head.end() :]
    return Instruction(opcode, tuple(_REGISTER.findall(written)), tuple(_REGISTER.findall(rest)), predicate)


@dataclass
class Program:
    """Instructions of an entry, and the positions of its labels."""

    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)

    @staticmethod
    def of(text: str) -> Program:
        program = Program()
        for statement in _STATEMENT.finditer(re.sub(r"//[^\n]*", "", text)):
            line = " ".join(statement["line"].split()) if statement["line"] else ""
            if statement["label"]:
                program.labels[statement["label"]] = len(program.instructions)
            elif line and not line.startswith("."):
                program.instructions.append(_instruction(line))
        return program


@dataclass(frozen=True)
class Path:
    """The state of a thread along a path.

    Attributes
    ----------
    depth
        For each register, the number of dependent loads that lead to its value.
    behind
        The same for the next instruction: from the branches taken, and from acquires, which all later loads wait for.
    chain
        The longest chain of loads so far.
    acquires
        The number of acquires.
    """

    at: int = 0
    depth: dict[str, int] = field(default_factory=dict)
    behind: int = 0
    chain: int = 0
    acquires: int = 0
    jumps: frozenset[int] = frozenset()


def paths_to_first_vote(program: Program) -> Iterator[Path]:
    """Walk all paths from the entry to the first barrier that joins what threads have found that contain no call, pause
    or atomic, each loop once: the paths of a thread in the normal case.
    """
    open_paths = [Path()]
    while open_paths:
        path = open_paths.pop()
        depth, behind, chain, acquires = dict(path.depth), path.behind, path.chain, path.acquires
        for at in range(path.at, len(program.instructions)):
            one = program.instructions[at]
            if one.is_barrier and ".red" not in one.opcode:
                behind = max(behind, chain)  # another thread may have had to wait for as many loads
                continue
            if one.is_barrier:
                yield replace(path, at=at, depth=depth, behind=behind, chain=chain, acquires=acquires)
                break
            if one.opcode.startswith(("call", "atom", "nanosleep", "ret", "exit", "trap")):
                break
            of_operands = max((depth.get(register, 0) for register in (*one.reads, one.predicate)), default=0)
            if one.opcode == "bra":
                after = max(behind, of_operands)
                now = Path(at, depth, after, chain, acquires, path.jumps | {at})
                target = program.labels[one.target]
                # Jumps backward lead to the test at a loop's head once, and never to another iteration.
                if target > at or (not one.predicate and at not in path.jumps):
                    open_paths.append(replace(now, at=target))
                if not one.predicate:
                    break
                behind = after
                continue
            value = max(of_operands, behind) + 1 if one.waits_for_memory else of_operands
            chain = max(chain, value) if one.waits_for_memory else chain
            if ".acquire" in one.opcode:
                behind, acquires = max(behind, value), acquires + 1
            depth.update(dict.fromkeys(one.writes, value))
