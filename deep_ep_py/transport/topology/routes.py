"""The path between every two ranks: the first, in order of preference, by which each reaches the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from deep_ep_py.transport.topology.matrix import matrix
from deep_ep_py.transport.topology.paths import PEER, PROXY, Path

NONE = "none"
"""The name used if there is no path."""
_REACHED, _NOT_ASKED, _FIRST_REASON = "+", ".", "a"
_MAX_REASONS = 20
"""How many reasons a rank distinguishes: each has a letter, and ranks exchange their texts."""
_UNTOLD = f"a reason besides the first {_MAX_REASONS}"
_WIDTH = 100


@dataclass(frozen=True)
class Reach:
    """The ranks that a rank reaches, and why not others, in a form compact enough for ranks to exchange.

    Attributes
    ----------
    names : tuple of str
        Names of the paths, in order of preference.
    rows : tuple of str
        By path, one character per rank: "+" reached; "." not asked, because an earlier path serves both directions;
        otherwise the reason why it is not reached, "a" for the first of `reasons`.
    reasons : tuple of str
        Why ranks are not reached.
    """

    names: tuple[str, ...]
    rows: tuple[str, ...]
    reasons: tuple[str, ...]

    @staticmethod
    def of(paths: Sequence[Path], rank: int, ranks: int) -> Reach:
        """Ask the paths of a rank."""
        reasons = list[str]()
        columns = [_column(paths, peer, reasons) for peer in range(ranks)]
        columns[rank] = _REACHED.ljust(len(paths), _NOT_ASKED)
        rows = ("".join(column[place] for column in columns) for place in range(len(paths)))
        return Reach(tuple(path.name for path in paths), tuple(rows), tuple(reasons))

    @staticmethod
    def told(value: Any) -> Reach:
        """Return the `Reach` of another rank from the lists that its `tell` returned."""
        return Reach(*(tuple(str(text) for text in part) for part in value))

    def tell(self) -> list[list[str]]:
        """Return the contents as lists, for ranks to exchange."""
        return [[*self.names], [*self.rows], [*self.reasons]]

    @property
    def in_use(self) -> set[str]:
        """The paths by which some rank may be reached."""
        return {name for name, row in zip(self.names, self.rows, strict=True) if _REACHED in row}

    @property
    def asked(self) -> set[str]:
        """The paths that were asked about some rank, whether or not they reach it."""
        return {name for name, row in zip(self.names, self.rows, strict=True) if row.strip(_NOT_ASKED)}

    def reached_by(self, peer: int) -> str:
        """Return the first path that reaches a rank; "none" if there is none."""
        reached = (name for name, row in zip(self.names, self.rows, strict=True) if row[peer] == _REACHED)
        return next(reached, NONE)

    def refusals(self, peer: int) -> str:
        """Return why a rank is not reached, for each path that was asked and does not reach it."""
        found = [
            f"{name}: {self.reasons[ord(row[peer]) - ord(_FIRST_REASON)]}"
            for name, row in zip(self.names, self.rows, strict=True)
            if row[peer] >= _FIRST_REASON
        ]
        return "; ".join(found)


def _column(paths: Sequence[Path], peer: int, reasons: list[str]) -> str:
    column = ""
    for path in paths:
        refusal = path.refusal(peer)
        column += _letter_of(refusal, reasons) if refusal else _REACHED
        if not refusal and path.mutual:
            break
    return column.ljust(len(paths), _NOT_ASKED)


def _letter_of(refusal: str, reasons: list[str]) -> str:
    if refusal not in reasons and len(reasons) >= _MAX_REASONS:
        refusal = _UNTOLD
    if refusal not in reasons:
        reasons.append(refusal)
    return chr(ord(_FIRST_REASON) + reasons.index(refusal))


@dataclass(frozen=True)
class Routes:
    """The paths that ranks take.

    Attributes
    ----------
    own : tuple of str
        The path from one rank to each, by rank; "peer" to itself, "none" if there is none.
    networks : tuple of str
        The paths other than "peer" that any two ranks take, in alphabetical order; the same on all ranks.
    """

    own: tuple[str, ...]
    networks: tuple[str, ...]

    @staticmethod
    def alone(reach: Reach, rank: int) -> Routes:
        """Return the routes that a rank would take if all others reached it as it reaches them."""
        own = [reach.reached_by(peer) for peer in range(len(reach.rows[0]))]
        own[rank] = PEER
        return Routes(tuple(own), tuple(sorted({*own} - {PEER, NONE})))

    @staticmethod
    def agreed(reaches: Sequence[Reach], rank: int, given: str, machines: Sequence[int]) -> Routes:
        """Return the routes of a rank, where each pair takes the first path by which each reaches the other.

        Parameters
        ----------
        reaches
            The `Reach` of every rank, by rank, with the same paths.
        rank
            The calling rank.
        given
            What the caller has passed about fabrics.
        machines
            The machine of each rank.

        Raises
        ------
        ValueError
            Two ranks have no path between them. The message has the reasons, and a table of all paths.
        """
        names = [*reaches[0].names, NONE]
        places = _places(reaches)
        missing = (places == len(names) - 1).nonzero()
        if len(missing):
            one, other = missing[0].tolist()
            table = matrix([[names[place] for place in row] for row in places.tolist()], _named(machines), _WIDTH)
            raise ValueError("\n  ".join([_complaint(reaches, one, other, given, machines), *table]))
        own = [names[place] for place in places[rank].tolist()]
        own[rank] = PEER
        off_diagonal = places[~torch.eye(len(reaches), dtype=torch.bool, device="cpu")]
        networks = {names[place] for place in off_diagonal.unique().tolist()} - {PEER}
        return Routes(tuple(own), tuple(sorted(networks)))


def _places(reaches: Sequence[Reach]) -> torch.Tensor:
    """Return, for each pair of ranks, the index of their path in the order of preference; past the end if none."""
    ranks, names = len(reaches), reaches[0].names
    places = torch.full((ranks, ranks), len(names), dtype=torch.int8, device="cpu")
    for place in reversed(range(len(names))):
        told = bytearray("".join(reach.rows[place] for reach in reaches).encode())
        reached = torch.frombuffer(told, dtype=torch.uint8).view(ranks, ranks) == ord(_REACHED)
        places[reached & reached.T] = place
    return places


def _complaint(reaches: Sequence[Reach], one: int, other: int, given: str, machines: Sequence[int]) -> str:
    ways = [(one, other), (other, one)]
    blocked = [(source, target) for source, target in ways if reaches[source].reached_by(target) == NONE]
    said = "; ".join(_refused(reaches[source], source, target) for source, target in blocked[:1] or ways)
    hint = ""
    if PROXY not in reaches[one].names and machines[one] != machines[other]:
        hint = f"; {PROXY!r} works between machines"
    elif reaches[one].names == (PEER,):
        hint = f"; with fabric={[PEER, PROXY]} the proxy joins them"
    return f"{given}: expected a path between every two of the {len(reaches)} ranks; {said}{hint}"


def _refused(reach: Reach, source: int, target: int) -> str:
    name = reach.reached_by(target)
    what = f"does not reach rank {target}" if name == NONE else f"reaches rank {target} only by {name}"
    return f"rank {source} {what} ({reach.refusals(target)})"


def _named(machines: Sequence[int]) -> list[tuple[str, list[int]]]:
    return [
        (f"machine {machine}", [rank for rank, place in enumerate(machines) if place == machine])
        for machine in sorted(set(machines))
    ]
