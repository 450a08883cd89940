"""The machine code that ptxas generates for a kernel, as shown by nvdisasm."""

from __future__ import annotations

import re
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

_WARP = 32
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*([^;]*);")
_LABEL = re.compile(r"^(\.L_x_\d+|[$_A-Za-z][\w$]*):")
_TARGET = re.compile(r"`\(([^)]+)\)")
_REGISTER = re.compile(r"\bR(\d+)")
# Loads of at least 16 bytes per thread; narrower ones do not load rows.
_WIDE = re.compile(r"^LDG?\..*\b(128|256)\b")
_BYTES = 16  # of an instruction
_DIVISION = "__cuda_sm20_div_u64"
_FENCE = re.compile(r"^MEMBAR\.\w+\.(GPU|SYS)")
# The sum of an addition that goes to no register is still waited for; a reduction would not be.
_UNUSED = re.compile(r"^(U?P\w+, )?RZ,")


@dataclass(frozen=True)
class Sass:
    """A kernel's machine code.

    Parameters
    ----------
    instructions : int
        Number of instructions.
    bulk_copies : int
        Number of instructions that start a bulk copy (UBLKCP).
    loaded_before_use : int
        Maximum number of bytes of rows that a warp loads into registers, in a stretch of code without a branch target,
        before an instruction uses any of them.
    fences_in_loops : int
        Number of fences at device or system scope in loops.
    local_loads_in_loops : int
        Number of loads from local memory in loops.
    generic_loads_in_loops : int
        Number of plain loads by generic address in loops: of kernel parameters, or of memory whose address space the
        compiler has lost.
    divisions_in_loops : int
        Number of 64-bit divisions in loops.
    unused_atomics : int
        Number of additions to global memory whose result nothing uses.
    """

    instructions: int
    bulk_copies: int
    loaded_before_use: int
    fences_in_loops: int
    local_loads_in_loops: int
    generic_loads_in_loops: int
    divisions_in_loops: int
    unused_atomics: int

    @property
    def code_bytes(self) -> int:
        """Size of the code."""
        return _BYTES * self.instructions


@dataclass(frozen=True)
class _Step:
    guard: str
    opcode: str
    operands: str
    label: bool
    """Whether a label precedes it."""


def find_nvdisasm() -> Path | None:
    """Return the path of nvdisasm, from `PATH` or the package `nvidia-cuda-nvdisasm`; None if it is not installed."""
    if (found := shutil.which("nvdisasm")) is not None:
        return Path(found)
    packaged = sorted(Path(sysconfig.get_path("purelib")).glob("nvidia/cu*/bin/nvdisasm"))
    return packaged[-1] if packaged else None


def disassemble(nvdisasm: Path, cubin: bytes, cold: Collection[str] = ()) -> Sass:
    """Disassemble a kernel.

    Parameters
    ----------
    nvdisasm
        The path that `find_nvdisasm` returns.
    cubin
        The kernel, as NVRTC returns it.
    cold
        Parts of the names of functions that hardly ever run: calls of them do not count as in a loop.

    Raises
    ------
    RuntimeError
        nvdisasm cannot be run, or does not support the architecture.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        try:
            done = subprocess.run([nvdisasm, "-c", file.name], capture_output=True, text=True, check=False)
        except OSError as error:
            raise RuntimeError(f"{nvdisasm}: {error}") from error
    if done.returncode != 0:
        raise RuntimeError(f"{nvdisasm}: {(done.stderr or done.stdout).strip()}")
    return read_sass(done.stdout, cold)


def read_sass(text: str, cold: Collection[str] = ()) -> Sass:
    """Parse the output of nvdisasm; `cold` as in `disassemble`."""
    steps, labels = _parse(text)
    looping = [steps[i] for i in _in_loops(steps, labels, cold)]
    opcodes = [step.opcode for step in looping]
    return Sass(
        instructions=len(steps),
        bulk_copies=sum(step.opcode.startswith("UBLKCP") for step in steps),
        loaded_before_use=_loaded_before_use(steps),
        fences_in_loops=sum(_FENCE.match(opcode) is not None for opcode in opcodes),
        local_loads_in_loops=sum(opcode.startswith("LDL") for opcode in opcodes),
        generic_loads_in_loops=sum(opcode.startswith("LD.") and "STRONG" not in opcode for opcode in opcodes),
        divisions_in_loops=sum(step.opcode.startswith("CALL") and _DIVISION in step.operands for step in looping),
        unused_atomics=sum(
            step.opcode.startswith("ATOM.E.ADD") and _UNUSED.match(step.operands) is not None for step in steps
        ),
    )


def _parse(text: str) -> tuple[list[_Step], dict[str, int]]:
    steps: list[_Step] = []
    labels: dict[str, int] = {}
    labelled = False
    for line in text.splitlines():
        if (label := _LABEL.match(line)) is not None:
            labels[label[1]] = len(steps)
            labelled = True
        elif (found := _INSTRUCTION.match(line)) is not None:
            steps.append(_Step(found[1] or "", found[2], found[3], labelled))
            labelled = False
    return steps, labels


def _in_loops(steps: Sequence[_Step], labels: dict[str, int], cold: Collection[str]) -> list[int]:
    """Return the instructions that can follow themselves, and all that functions called from there execute."""
    next_ = [_followers(i, step, labels) for i, step in enumerate(steps)]
    called = {
        i: labels[target[1]]
        for i, step in enumerate(steps)
        if step.opcode.startswith("CALL")
        and (target := _TARGET.search(step.operands)) is not None
        and target[1] in labels
        and not any(name in target[1] for name in cold)
    }
    graph = {i: [j for j in after if j < len(steps)] for i, after in enumerate(next_)}
    looping = {i for component in _components(graph) for i in component}
    reached: set[int] = set()
    waiting = [called[i] for i in looping if i in called]
    while waiting:
        if (at := waiting.pop()) in reached:
            continue
        reached.add(at)
        waiting.extend(graph[at])
        if at in called:
            waiting.append(called[at])
    return sorted(looping | reached)


def _followers(i: int, step: _Step, labels: dict[str, int]) -> list[int]:
    after = [i + 1]
    if step.opcode.startswith(("BRA", "EXIT", "RET", "BRX")) and not step.guard:
        after = []
    if step.opcode.startswith("BRA") and (target := _TARGET.search(step.operands)) is not None:
        after.append(labels[target[1]])
        # A branch that only some lanes take (BRA.DIV) also goes on.
        if step.opcode.startswith("BRA.DIV") and i + 1 not in after:
            after.append(i + 1)
    return after


def _components(graph: dict[int, list[int]]) -> list[list[int]]:
    """Return the cycles of a graph: its strongly connected components with an edge inside (Tarjan)."""
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[int] = []
    on_stack: set[int] = set()
    found = []
    for root in graph:
        if root in index:
            continue
        work = [(root, iter(graph[root]))]
        index[root] = low[root] = len(index)
        stack.append(root)
        on_stack.add(root)
        while work:
            at, after = work[-1]
            for follower in after:
                if follower not in index:
                    index[follower] = low[follower] = len(index)
                    stack.append(follower)
                    on_stack.add(follower)
                    work.append((follower, iter(graph[follower])))
                    break
                if follower in on_stack:
                    low[at] = min(low[at], index[follower])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[at])
                if low[at] == index[at]:
                    begin = stack.index(at)
                    component = stack[begin:]
                    del stack[begin:]
                    on_stack.difference_update(component)
                    if len(component) > 1 or at in graph[at]:
                        found.append(component)
    return found


def _loaded_before_use(steps: Iterable[_Step]) -> int:
    most = 0
    pending: dict[int, int] = {}  # bytes of a load, by its first register
    busy: set[int] = set()
    for step in steps:
        registers = [int(number) for number in _REGISTER.findall(step.operands)]
        if step.label or busy.intersection(registers):
            pending, busy = {}, set()
        if (wide := _WIDE.match(step.opcode)) is not None and registers:
            size = int(wide[1]) // 8
            pending[registers[0]] = size
            busy.update(range(registers[0], registers[0] + size // 4))
            most = max(most, _WARP * sum(pending.values()))
    return most
