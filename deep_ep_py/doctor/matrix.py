"""The path between each two ranks of a job, as a table that fits a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from deep_ep_py.doctor.job import Job, Machine

_MOST_RANKS = 64
"""Up to which each has a line; beyond, each machine has."""
_LETTERS = {"peer": "P", "ibgda": "I", "proxy": "X", "weak": "W"}
_MEANINGS = {
    "P": "peer, loads and stores",
    "I": "ibgda, kernels post on NICs",
    "X": "proxy, a thread of the host posts",
    "W": "weak, for tests",
    "*": "several of these",
    "?": "some other path",
}
_SELF, _SEVERAL, _OTHER = ".", "*", "?"
_LEAST_COLUMNS = 10


def matrix(job: Job, width: int) -> list[str]:
    """Return the lines of a table, from each rank to each, or from each machine to each where there are many ranks.

    Parameters
    ----------
    job
        Whose routes are known.
    width
        Characters that a line may have; where they do not suffice for all columns, the table comes in parts.
    """
    if len(job.routes) <= _MOST_RANKS:
        cells = [
            "".join(_SELF if one == other else _letter(path) for other, path in enumerate(row))
            for one, row in enumerate(job.routes)
        ]
        return [*_table("rank", cells, width), *_legend(cells)]
    cells = ["".join(_between(job, one, other) for other in job.machines) for one in job.machines]
    keys = [f"machine {number}: {machine.ranks_text}, {machine.name}" for number, machine in enumerate(job.machines)]
    return [*_table("machine", cells, width), *_legend(cells), *keys]


def _letter(path: str) -> str:
    return _LETTERS.get(path, _OTHER)


def _between(job: Job, one: Machine, other: Machine) -> str:
    paths = {job.routes[rank][peer] for rank in one.ranks for peer in other.ranks if rank != peer}
    if not paths:
        return _SELF
    return _letter(paths.pop()) if len(paths) == 1 else _SEVERAL


def _table(of: str, cells: Sequence[str], width: int) -> list[str]:
    """Number rows and columns, a column's number from top to bottom; rows that are equal one after another share a
    line.
    """
    digits = len(str(len(cells) - 1))
    rows = list[tuple[str, str]]()
    start = 0
    for row in range(1, len(cells) + 1):
        if row == len(cells) or cells[row] != cells[start]:
            rows.append((str(start) if row == start + 1 else f"{start}-{row - 1}", cells[start]))
            start = row
    label = max(len(name) for name, _ in rows)
    columns = max(_LEAST_COLUMNS, width - label - 2)
    lines = []
    for first in range(0, len(cells), columns):
        last = min(first + columns, len(cells)) - 1
        if len(cells) > columns:
            lines.append(f"to {of}s {first} to {last}:")
        for place in range(digits):
            numbers = (f"{column:>{digits}}"[place] for column in range(first, last + 1))
            lines.append(f"{'':>{label}}  {''.join(numbers)}".rstrip())
        lines += [f"{name:>{label}}  {line[first : last + 1]}" for name, line in rows]
    return lines


def _legend(cells: Sequence[str]) -> list[str]:
    """Say what the letters mean that are there."""
    there = set("".join(cells))
    return [f"{letter}: {text}" for letter, text in _MEANINGS.items() if letter in there]
