"""PTX of our kernels, and how many loads of memory stand one behind the other on a path through it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from deep_ep_py.jit import KERNELS, Shape
from deep_ep_py.jit.ptx import compile_ptx

_ENTRY = re.compile(r"\.entry [^{]*\n\{\n.*?\n\}", re.DOTALL)
_LOCATION = re.compile(r"^\s*\.loc\s.*\n", re.MULTILINE)
_REGISTER = re.compile(r"%[A-Za-z]\w*")
_STATEMENT = re.compile(r"\s*(?:(?P<label>\$\w+):|[{}]|(?P<line>(?:[^;{}]|\{[^{};]*\})+;))")
# Loads that no memory answers: of the launch's arguments, of a thread's own variables, of shared memory.
_NEAR = ("ld.param", "ld.local", "ld.shared", "ld.const")


def ptx_of(name: str, shape: Shape, architecture: str) -> str:
    """Return the text of a kernel's entry, as NVRTC makes it, without the lines that it comes from."""
    text, _ = compile_ptx(KERNELS[name], shape, architecture)
    entry = _ENTRY.search(_LOCATION.sub("", text))
    assert entry, "the text has an entry"
    return entry[0]


@dataclass(frozen=True)
class Instruction:
    """One line: `opcode`, the registers it writes and reads, its predicate, the label that it jumps to."""

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
    """Instructions of an entry, and where its labels are."""

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
    """What a thread has come through.

    Attributes
    ----------
    depth
        Of each register: how many loads stand one behind the other in front of its value.
    behind
        The same of what is executed next: of the branches taken, and of acquires, which all later loads wait for.
    chain
        The longest so far.
    acquires
        How many acquires.
    """

    at: int = 0
    depth: dict[str, int] = field(default_factory=dict)
    behind: int = 0
    chain: int = 0
    acquires: int = 0
    jumps: frozenset[int] = frozenset()


def paths_to_first_barrier(program: Program) -> Iterator[Path]:
    """Walk all paths from the entry to the first barrier that call nothing, pause nowhere and swap nothing, each loop
    once: those of a thread for which all is as it should be.
    """
    open_paths = [Path()]
    while open_paths:
        path = open_paths.pop()
        depth, behind, chain, acquires = dict(path.depth), path.behind, path.chain, path.acquires
        for at in range(path.at, len(program.instructions)):
            one = program.instructions[at]
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
                # Back: to a test at a loop's head once, to another turn never.
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
