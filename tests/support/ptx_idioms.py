"""The instructions in the kernels' PTX that order memory, by the source lines that they come from, and how they may
be weakened.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

from places import CSRC

_FILE = re.compile(r'\.file\s+(\d+)\s+"([^"]+)"')
_LOC = re.compile(r"\.loc\s+(\d+) (\d+) (\d+)(?:, function_name \S+, inlined_at (\d+) (\d+) (\d+))?")
_STATEMENT = re.compile(r"^(\s*(?:@!?%p\d+\s+)?)([a-z][\w.:]*)(.*;)(.*)$")
_ORDERS = re.compile(
    r"^((ld|st|atom|red)\..*(acquire|release|acq_rel|relaxed)|bar\.|barrier\.|mbarrier\.|cp\.async\.bulk|fence\.)"
)
_TARGET = "/device/cuda/"
"""Sources of functions that only wrap an instruction; their purpose shows at the call site."""


@dataclass(frozen=True, order=True)
class Idiom:
    """An instruction that orders memory, by its source: all places in the PTX that come from one line."""

    file: str
    text: str
    opcode: str

    def __str__(self) -> str:
        return f"{self.file}: {self.text} ({self.opcode})"


@dataclass(frozen=True, order=True)
class Weakened:
    """An idiom, weakened by one step."""

    idiom: Idiom
    how: str

    def __str__(self) -> str:
        return f"{self.how}: {self.idiom}"

    def applied(self, text: str) -> str:
        """Return a kernel's text with all places of the idiom changed."""
        lines = text.splitlines(keepends=True)
        change = _WEAKENINGS[self.how]
        for number, idiom in idioms_of(text):
            if idiom == self.idiom:
                lines[number] = _change(lines[number], change)
        return "".join(lines)


Change = Callable[[str, str], str | None]
"""Maps an opcode and its operands to a statement; None: this weakening does not apply."""


def _replaced(before: str, after: str) -> Change:
    def change(opcode: str, operands: str) -> str | None:
        if not re.search(before, opcode):
            return None
        return re.sub(before, after, opcode, count=1) + operands

    return change


def _removed(pattern: str) -> Change:
    return lambda opcode, operands: "" if re.match(pattern, opcode) else None


def _meets_no_others(opcode: str, operands: str) -> str | None:
    """Give each thread its own answer."""
    if not opcode.startswith(("bar.red", "barrier.cta.red")):
        return None
    names = [name.strip() for name in operands.rstrip(";").split(",")]
    return f"or.pred {names[0]}, {names[-1]}, {names[-1]};"


def _one_warp_fewer(opcode: str, operands: str) -> str | None:
    """Count one warp fewer at a barrier with a number of threads."""
    names = [name.strip() for name in operands.rstrip(";").split(",")]
    if not opcode.startswith("barrier.cta.red") or len(names) != 4 or not names[2].isdigit():
        return None
    names[2] = str(int(names[2]) - 32)
    return f"{opcode} {', '.join(names)};"


def _one_more_pending(opcode: str, operands: str) -> str | None:
    if opcode != "cp.async.bulk.wait_group.read":
        return None
    return f"{opcode} {int(operands.strip().rstrip(';')) + 1};"


def _as_if_ended(opcode: str, operands: str) -> str | None:
    if not opcode.startswith("mbarrier.try_wait"):
        return None
    return f"setp.eq.u32 {operands.split(',')[0].strip()}, 0, 0;"


def _of_the_other_space(opcode: str, operands: str) -> str | None:
    """Order the other one of global and shared memory before bulk copies."""
    spaces = {"fence.proxy.async.global": "shared::cta", "fence.proxy.async.shared::cta": "global"}
    return f"fence.proxy.async.{spaces[opcode]}{operands}" if opcode in spaces else None


_WEAKENINGS: dict[str, Change] = {
    "without its release": _replaced(r"^(st|atom|red)\.release", r"\1.relaxed"),
    "without its acquire": _replaced(r"^(ld|atom)\.acquire", r"\1.relaxed"),
    "its release alone": _replaced(r"^atom\.acq_rel", "atom.release"),
    "its acquire alone": _replaced(r"^atom\.acq_rel", "atom.acquire"),
    "device scope": _replaced(r"^((?:ld|st|atom|red|fence)\..*)\.sys\b", r"\1.gpu"),
    "block scope": _replaced(r"^((?:ld|st|atom|red)\..*)\.gpu\b", r"\1.cta"),
    "left out": _removed(r"bar\.warp\.sync|bar\.sync|fence\.|cp\.async\.bulk\.(wait|commit)_group|mbarrier\.init"),
    "of the other space": _of_the_other_space,
    "meets no others": _meets_no_others,
    "one warp fewer": _one_warp_fewer,
    "its reads alone": _replaced(r"^cp\.async\.bulk\.wait_group$", "cp.async.bulk.wait_group.read"),
    "one more pending": _one_more_pending,
    "as if it had ended": _as_if_ended,
}


def weakenings_of(idiom: Idiom, sample: str) -> list[Weakened]:
    """Return all weakenings of an idiom, of which `sample` is a statement in the PTX."""
    found = _STATEMENT.match(sample)
    assert found is not None, sample
    return [Weakened(idiom, how) for how, change in _WEAKENINGS.items() if change(found[2], found[3]) is not None]


def _change(line: str, change: Change) -> str:
    found = _STATEMENT.match(line)
    assert found is not None, line
    changed = change(found[2], found[3])
    assert changed is not None, line
    assert changed or not found[1].strip(), f"a guarded instruction would be left out: {line}"
    return f"{found[1]}{changed}{found[4]}\n"


@cache
def idioms_of(text: str) -> tuple[tuple[int, Idiom], ...]:
    """Return where a kernel's text orders memory: line numbers from 0."""
    return tuple(_idioms(text))


def _idioms(text: str) -> Iterator[tuple[int, Idiom]]:
    files = {int(number): path for number, path in _FILE.findall(text)}
    inlined: dict[tuple[int, int, int], tuple[int, int, int] | None] = {}
    here: tuple[int, int, int] | None = None
    for number, line in enumerate(text.splitlines()):
        if loc := _LOC.search(line):
            here = int(loc[1]), int(loc[2]), int(loc[3])
            inlined[here] = (int(loc[4]), int(loc[5]), int(loc[6])) if loc[4] else None
            continue
        statement = _STATEMENT.match(line)
        if statement is None or not _ORDERS.match(statement[2]):
            continue
        place = here
        while place is not None and _TARGET in files[place[0]] and inlined.get(place) is not None:
            place = inlined[place]
        if place is not None:
            yield number, Idiom(*_source(files[place[0]], place[1]), statement[2])


@cache
def _source(file: str, line: int) -> tuple[str, str]:
    """Return a file below the sources, and one of its lines; both are stable when other lines are added or removed.

    PTX may have been compiled in another folder, from the same sources.
    """
    name = file.rpartition("/csrc/")[2]
    return name, (CSRC / name).read_text().splitlines()[line - 1].strip() if line else ""
