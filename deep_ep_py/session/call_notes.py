"""What ranks were called with, exchanged once their calls are found not to match."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Protocol

from deep_ep_py.bootstrap.connections import Connections
from deep_ep_py.bootstrap.groups import Bootstrap
from deep_ep_py.core.arguments import difference
from deep_ep_py.core.native import C

_PAUSE = 0.002


@dataclass(frozen=True)
class Note:
    """One rank's call: which operation of which generation it was, and the arguments on which all ranks must agree."""

    generation: int
    operation: int
    kind: str
    arguments: dict[str, int]

    @staticmethod
    def of(call: C.Call) -> Note:
        """Describe a call."""
        return Note(call.generation, call.operation, call.kind, dict(call.arguments))


class Exchange(Protocol):
    """Passes notes between ranks without waiting for any of them."""

    seconds: float
    """How long to wait for the others' notes."""

    def begin(self, call: C.Call) -> None:
        """Note that this rank is about to wait for a call."""

    def notes(self, mine: Note) -> dict[int, Note]:
        """Tell the other ranks of this rank's call; return the latest note of each rank that has told of its own."""

    def leave_reason(self, why: str) -> None:
        """Tell the other ranks why this one is about to give up."""

    def reason_of(self, rank: int) -> str:
        """Return why another rank has given up; "" if it has not said."""


class SharedNotes:
    """An `Exchange` among ranks that are threads of one process.

    Kernels of such ranks run while all of them wait, so that a rank that reports a mismatch cannot wait for another to
    do so too: each says which call it waits for beforehand.

    Parameters
    ----------
    rank : int
        This rank.
    calls, reasons : dict
        One of each for all ranks.
    """

    seconds = 0.0

    def __init__(self, rank: int, calls: dict[int, C.Call], reasons: dict[int, str]) -> None:
        self._rank, self._calls = rank, calls
        self._reasons = reasons

    def begin(self, call: C.Call) -> None:
        """Keep the call."""
        self._calls[self._rank] = call

    def notes(self, mine: Note) -> dict[int, Note]:
        """Return the calls that the others wait for, or have waited for last."""
        del mine
        return {rank: Note.of(call) for rank, call in self._calls.copy().items() if rank != self._rank}

    def leave_reason(self, why: str) -> None:
        """Keep this rank's reason."""
        self._reasons[self._rank] = why

    def reason_of(self, rank: int) -> str:
        """Return another rank's reason."""
        return self._reasons.get(rank, "")


class SentNotes:
    """An `Exchange` among processes.

    Parameters
    ----------
    connections : Connections
        Carries the notes.
    """

    seconds = 0.5  # ranks notice a mismatch within milliseconds of each other

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._left: Note | None = None

    def begin(self, call: C.Call) -> None:
        """Do nothing: notes are sent once something has failed."""

    def notes(self, mine: Note) -> dict[int, Note]:
        """Send this rank's note, once, and return the others'."""
        if self._left != mine:
            self._left = mine
            self._connections.leave_note({"call": asdict(mine)})
        return {rank: Note(**note["call"]) for rank, note in self._connections.notes().items() if "call" in note}

    def leave_reason(self, why: str) -> None:
        """Send this rank's reason."""
        self._connections.leave_note({"reason": why})

    def reason_of(self, rank: int) -> str:
        """Return another rank's reason."""
        return str(self._connections.notes().get(rank, {}).get("reason", ""))


def exchange_among(bootstrap: Bootstrap) -> Exchange:
    """Return what passes notes between the ranks of a Buffer. Collective among ranks that are threads."""
    if isinstance(bootstrap, Connections):
        return SentNotes(bootstrap)
    calls, reasons = bootstrap.all_gather(({}, {}))[0]
    return SharedNotes(bootstrap.rank, calls, reasons)


def mismatch_text(exchange: Exchange, call: C.Call, rank: int, others: set[int]) -> str:
    """Return how the ranks' calls differ, as far as the ranks say soon enough; "" if they do not say.

    Parameters
    ----------
    exchange : Exchange
        Passes the notes.
    call : native.C.Call
        This rank's call.
    rank : int
        This rank.
    others : set of int
        The ranks that take part.
    """
    mine = Note.of(call)
    deadline = time.monotonic() + exchange.seconds
    while True:
        said = exchange.notes(mine)
        notes = {peer: note for peer, note in said.items() if peer in others and _is_same_operation(note, mine)}
        if len(notes) == len(others) or time.monotonic() >= deadline:
            return _differences({rank: mine} | notes)
        time.sleep(_PAUSE)


def _is_same_operation(note: Note, mine: Note) -> bool:
    return (note.generation, note.operation) == (mine.generation, mine.operation)


def _differences(notes: dict[int, Note]) -> str:
    kinds = {rank: note.kind for rank, note in notes.items()}
    if found := difference(kinds):
        return f"which call ({found})"
    names = next(iter(notes.values())).arguments
    found_all = {name: difference({rank: note.arguments.get(name) for rank, note in notes.items()}) for name in names}
    return ", ".join(f"{name} ({found})" for name, found in found_all.items() if found)
