"""The machine code that ptxas generates for a kernel, as shown by nvdisasm."""

from __future__ import annotations

import re
import shutil
import subprocess
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path

_WARP = 32
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*([^;]*);")
_LABEL = re.compile(r"^\.L_x_\d+:")
_REGISTER = re.compile(r"\bR(\d+)")
# Loads of at least 16 bytes per thread; narrower ones do not load rows.
_WIDE = re.compile(r"^LDG?\..*\b(128|256)\b")


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
    """

    instructions: int
    bulk_copies: int
    loaded_before_use: int


def find_nvdisasm() -> Path | None:
    """Return the path of nvdisasm, from `PATH` or the package `nvidia-cuda-nvdisasm`; None if it is not installed."""
    if (found := shutil.which("nvdisasm")) is not None:
        return Path(found)
    packaged = sorted(Path(sysconfig.get_path("purelib")).glob("nvidia/cu*/bin/nvdisasm"))
    return packaged[-1] if packaged else None


def disassemble(nvdisasm: Path, cubin: bytes) -> Sass:
    """Disassemble a kernel.

    Parameters
    ----------
    nvdisasm
        The path that `find_nvdisasm` returns.
    cubin
        The kernel, as NVRTC returns it.

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
    return read_sass(done.stdout)


def read_sass(text: str) -> Sass:
    """Parse the output of nvdisasm."""
    instructions = bulk_copies = most = 0
    pending: dict[int, int] = {}  # bytes of a load, by its first register
    busy: set[int] = set()
    for line in text.splitlines():
        if _LABEL.match(line):
            pending, busy = {}, set()
            continue
        found = _INSTRUCTION.match(line)
        if found is None:
            continue
        opcode, operands = found.groups()
        instructions += 1
        bulk_copies += opcode.startswith("UBLKCP")
        registers = [int(number) for number in _REGISTER.findall(operands)]
        if busy.intersection(registers):
            pending, busy = {}, set()
        if (wide := _WIDE.match(opcode)) is not None and registers:
            size = int(wide[1]) // 8
            pending[registers[0]] = size
            busy.update(range(registers[0], registers[0] + size // 4))
            most = max(most, _WARP * sum(pending.values()))
    return Sass(instructions, bulk_copies, most)
