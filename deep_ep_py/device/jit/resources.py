"""SM resources of a compiled kernel, from the report of ptxas (`-v`) and from the cubin itself."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass

# The symbol with the dynamic shared memory of a program's launch; see compiler.py.
DYNAMIC_SHARED_SYMBOL = "deep_ep_dynamic_shared_bytes"

_PROPERTIES = re.compile(r"Function properties for (?P<symbol>\S+)")
_STACK = re.compile(r"(?P<stack>\d+) bytes stack frame")
_SPILLS = re.compile(r"(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (?P<registers>\d+) registers")
_BARRIERS = re.compile(r"used (?P<barriers>\d+) barriers")
_SHARED = re.compile(r"(?P<shared>\d+) bytes smem")


@dataclass(frozen=True)
class Resources:
    """Resources of one kernel, in bytes except for registers (per thread) and barriers (per block).

    Spills are those of the kernel and of all functions that it calls, since ptxas allocates registers for both together
    and may spill in either.
    """

    registers: int
    barriers: int
    static_shared: int
    dynamic_shared: int
    local: int
    spill_stores: int
    spill_loads: int
    code: int


def read_resources(symbol: str, log: str, cubin: bytes) -> Resources:
    """Collect the resources of one kernel from its compilation.

    Parameters
    ----------
    symbol
        The kernel's mangled name.
    log
        The output of ptxas with `-v`, for this kernel only.
    cubin
        The compiled program.

    Returns
    -------
    Resources

    Raises
    ------
    ValueError
        The kernel is missing in the log or the cubin.
    """
    report = _report_of(symbol, log)
    registers, stack, spills = _REGISTERS.search(report), _STACK.search(report), list(_SPILLS.finditer(log))
    if registers is None or stack is None or not spills:
        raise ValueError(f"ptxas reports no registers, spills or stack for {symbol}:\n{report}")
    barriers, shared = _BARRIERS.search(report), _SHARED.search(report)
    elf = _Elf(cubin)
    return Resources(
        registers=int(registers["registers"]),
        barriers=int(barriers["barriers"]) if barriers else 0,
        static_shared=int(shared["shared"]) if shared else 0,
        dynamic_shared=int.from_bytes(elf.symbol(DYNAMIC_SHARED_SYMBOL), "little"),
        local=int(stack["stack"]),
        spill_stores=sum(int(of["stores"]) for of in spills),
        spill_loads=sum(int(of["loads"]) for of in spills),
        code=elf.section(f".text.{symbol}").size,
    )


def _report_of(symbol: str, log: str) -> str:
    """Return the part of the log about one function."""
    marks = list(_PROPERTIES.finditer(log))
    for mark, following in zip(marks, [*marks[1:], None]):
        if mark["symbol"] == symbol:
            return log[mark.start() : following.start() if following else len(log)]
    raise ValueError(f"ptxas does not report {symbol}:\n{log}")


@dataclass(frozen=True)
class _Section:
    name: str
    kind: int
    offset: int
    size: int
    link: int


class _Elf:
    """A reader for the sections and symbols of a cubin, a 64-bit little-endian ELF file."""

    _SYMBOL_TABLE = 2

    def __init__(self, data: bytes) -> None:
        if data[:6] != b"\x7fELF\x02\x01":
            raise ValueError("the program is not a cubin")
        self._data = data
        (table,) = struct.unpack_from("<Q", data, 0x28)
        entry, count, names = struct.unpack_from("<HHH", data, 0x3A)
        raw = [struct.unpack_from("<IIQQQQI", data, table + i * entry) for i in range(count)]
        strings = raw[names][4]
        self._sections = [
            _Section(self._string(strings + name), kind, offset, size, link)
            for name, kind, _, _, offset, size, link in raw
        ]

    def _string(self, offset: int) -> str:
        return self._data[offset : self._data.index(b"\0", offset)].decode()

    def section(self, name: str) -> _Section:
        """Return the section with this name."""
        for section in self._sections:
            if section.name == name:
                return section
        raise ValueError(f"the cubin has no section {name}")

    def symbol(self, name: str) -> bytes:
        """Return the initial value of a variable."""
        for symbol, index, value, size in self._symbols():
            if symbol == name:
                start = self._sections[index].offset + value
                return self._data[start : start + size]
        raise ValueError(f"the cubin has no symbol {name}")

    def _symbols(self) -> Iterator[tuple[str, int, int, int]]:
        for table in self._sections:
            if table.kind != self._SYMBOL_TABLE:
                continue
            strings = self._sections[table.link].offset
            for offset in range(table.offset, table.offset + table.size, 24):
                name, _, _, index, value, size = struct.unpack_from("<IBBHQQ", self._data, offset)
                yield self._string(strings + name), index, value, size
