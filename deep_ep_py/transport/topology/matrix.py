"""The path between every two ranks, as a table that fits a terminal."""

from __future__ import annotations

from collections.abc import Sequence

_MAX_RANKS = 64
"""Up to this many ranks, the table has a line per rank; beyond, one per machine."""
_LETTERS = {"peer": "P", "ibgda": "I", "proxy": "X", "weak": "W", "none": "-"}
_MEANINGS = {
    "P": "peer, loads and stores",
    "I": "ibgda, kernels post on NICs",
    "X": "proxy, a host thread posts",
    "W": "weak, for tests",
    "-": "none",
    "*": "several of these",
    "?": "some other path",
}
_SELF, _SEVERAL, _OTHER = ".", "*", "?"
_MIN_COLUMNS = 10


def matrix(routes: Sequence[Sequence[str]], machines: Sequence[tuple[str, Sequence[int]]], width: int) -> list[str]:
    """Return the lines of a table of paths between ranks, or between machines if there are many ranks.

    Parameters
    ----------
    routes
        The name of the path from each rank to each, "none" if there is none.
    machines
        Their names and their ranks.
    width
        Maximum length of a line; if all columns do not fit, the table is split into parts.
    """
    if len(routes) <= _MAX_RANKS:
        cells = [
            "".join(_SELF if one == other else _letter(path) for other, path in enumerate(row))
            for one, row in enumerate(routes)
        ]
        return [*_table("rank", cells, width), *_legend(cells)]
    of_each = [ranks for _, ranks in machines]
    cells = ["".join(_between(routes, one, other) for other in of_each) for one in of_each]
    keys = [f"machine {number}: {ranks_text(ranks)}, {name}" for number, (name, ranks) in enumerate(machines)]
    return [*_table("machine", cells, width), *_legend(cells), *keys]


def ranks_text(ranks: Sequence[int]) -> str:
    """Format ranks for people: "ranks 0-7, 16"."""
    runs = list[list[int]]()
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    texts = (f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(texts)}"


def _letter(path: str) -> str:
    return _LETTERS.get(path, _OTHER)


def _between(routes: Sequence[Sequence[str]], ranks: Sequence[int], others: Sequence[int]) -> str:
    paths = {routes[rank][peer] for rank in ranks for peer in others if rank != peer}
    if not paths:
        return _SELF
    return _letter(paths.pop()) if len(paths) == 1 else _SEVERAL


def _table(of: str, cells: Sequence[str], width: int) -> list[str]:
    """Return the table with numbered rows and columns.

    A column's number reads from top to bottom. Consecutive equal rows share a line.
    """
    digits = len(str(len(cells) - 1))
    rows = list[tuple[str, str]]()
    start = 0
    for row in range(1, len(cells) + 1):
        if row == len(cells) or cells[row] != cells[start]:
            rows.append((str(start) if row == start + 1 else f"{start}-{row - 1}", cells[start]))
            start = row
    label = max(len(name) for name, _ in rows)
    columns = max(_MIN_COLUMNS, width - label - 2)
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
    """Explain the letters that occur."""
    there = set("".join(cells))
    return [f"{letter}: {text}" for letter, text in _MEANINGS.items() if letter in there]
