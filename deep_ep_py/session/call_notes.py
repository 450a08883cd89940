"""What ranks were called with, exchanged once their calls are found not to match."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from deep_ep_py.base.arguments import difference
from deep_ep_py.base.native import C
from deep_ep_py.transport.bootstrap.connections import Connections
from deep_ep_py.transport.bootstrap.groups import Bootstrap

_PAUSE = 0.002


@dataclass(frozen=True)
class Note:
    """One rank's call: which operation of which generation it was, and the arguments on which all ranks must agree."""

    generation: int
    operation: int
    kind: str
    arguments: dict[str, int]

    @staticmethod
    def of(call: C.Call, operation: int) -> Note:
        """Describe a call. Reads nothing that kernels write."""
        return Note(call.generation, operation, call.kind, dict(call.arguments))


class Exchange(Protocol):
    """Passes notes between ranks without waiting for any of them."""

    seconds: float
    """How long to wait for the others' notes."""

    def begin(self, call: C.Call, operation: int) -> None:
        """Note a call that this rank has begun."""

    def note_of(self, call: C.Call) -> Note | None:
        """Return this rank's note of a call that has failed, if there is one."""

    def notes(self, mine: Note) -> dict[int, Note]:
        """Tell the other ranks of this rank's call; return the latest note of each rank that has told of its own."""

    def leave_reason(self, why: str, generation: int) -> None:
        """Tell the other ranks why this one is about to give up in a generation."""

    def reason_of(self, rank: int, generation: int) -> str:
        """Return why another rank has given up in a generation; "" if it has not said."""

    def begin_generation(self) -> None:
        """Take in what the others have sent, so that notes never fill what carries them."""


class SharedNotes:
    """An `Exchange` among ranks that are threads of one process.

    Kernels of such ranks run while all of them wait, so a rank that reports a mismatch cannot wait for another rank's
    report. Therefore each rank leaves a note whenever it begins a call.

    Parameters
    ----------
    rank : int
        This rank.
    begun, reasons : dict
        One of each for all ranks.
    """

    seconds = 0.0

    def __init__(self, rank: int, begun: dict[int, Note], reasons: dict[int, tuple[int, str]]) -> None:
        self._rank, self._begun = rank, begun
        self._reasons = reasons

    def begin(self, call: C.Call, operation: int) -> None:
        """Leave a note."""
        self._begun[self._rank] = Note.of(call, operation)

    def note_of(self, call: C.Call) -> Note | None:
        """Return the note, unless another call has been begun since."""
        mine = self._begun.get(self._rank)
        same = mine is not None and (mine.kind, mine.arguments) == (call.kind, dict(call.arguments))
        return mine if same else None

    def notes(self, mine: Note) -> dict[int, Note]:
        """Return the others' notes."""
        del mine
        return {rank: note for rank, note in self._begun.copy().items() if rank != self._rank}

    def leave_reason(self, why: str, generation: int) -> None:
        """Keep this rank's reason."""
        self._reasons[self._rank] = generation, why

    def reason_of(self, rank: int, generation: int) -> str:
        """Return another rank's reason."""
        said, why = self._reasons.get(rank, (0, ""))
        return why if said == generation else ""

    def begin_generation(self) -> None:
        """Do nothing: notes take no room."""


class SentNotes:
    """An `Exchange` among processes.

    A rank sends at most one note of each kind in a generation, and reads all that have come when a generation begins:
    so they never fill the sockets, which later exchanges use too.

    Parameters
    ----------
    connections : Connections
        Carries the notes.
    """

    seconds = 0.5  # ranks notice a mismatch within milliseconds of each other

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._left: set[tuple[str, int]] = set()
        self._operations: WeakKeyDictionary[C.Call, int] = WeakKeyDictionary()

    def begin(self, call: C.Call, operation: int) -> None:
        """Keep the number of its operation: a note is sent once something has failed."""
        self._operations[call] = operation

    def note_of(self, call: C.Call) -> Note | None:
        """Describe the call, whose kernels have left.

        Only they know the operation of a graph's replay; those of another call may have left before they stored theirs.
        """
        return Note.of(call, call.operation if call.captured else self._operations.get(call, call.operation))

    def notes(self, mine: Note) -> dict[int, Note]:
        """Send this rank's note, once, and return the others'."""
        self._leave("call", mine.generation, asdict(mine))
        return {rank: Note(**note["call"]) for rank, note in self._connections.notes().items() if "call" in note}

    def leave_reason(self, why: str, generation: int) -> None:
        """Send this rank's reason."""
        self._leave("reason", generation, {"generation": generation, "why": why})

    def reason_of(self, rank: int, generation: int) -> str:
        """Return another rank's reason."""
        said = self._connections.notes().get(rank, {}).get("reason", {})
        return str(said["why"]) if said.get("generation") == generation else ""

    def begin_generation(self) -> None:
        """Read what has come."""
        self._connections.notes()

    def _leave(self, kind: str, generation: int, value: dict[str, Any]) -> None:
        if (kind, generation) not in self._left:
            self._left = {one for one in self._left if one[1] == generation} | {(kind, generation)}
            self._connections.leave_note({kind: value})


def exchange_among(bootstrap: Bootstrap) -> Exchange:
    """Return what passes notes between the ranks of a Buffer. Collective among ranks that are threads."""
    if isinstance(bootstrap, Connections):
        return SentNotes(bootstrap)
    begun, reasons = bootstrap.all_gather(({}, {}))[0]
    return SharedNotes(bootstrap.rank, begun, reasons)


def mismatch_text(
    exchange: Exchange, call: C.Call, rank: int, others: set[int], words: Mapping[str, Callable[[int], str]]
) -> str:
    """Return the text of a call's failure because ranks' calls differ; "" if they do not say soon enough how.

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
    words : mapping
        Functions that return the text of an argument's value, by its name.
    """
    mine = exchange.note_of(call)
    if mine is None:
        return ""
    deadline = time.monotonic() + exchange.seconds
    while True:
        said = exchange.notes(mine)
        notes = {peer: note for peer, note in said.items() if peer in others and note.generation == mine.generation}
        if len(notes) == len(others) or time.monotonic() >= deadline:
            return _text({rank: mine} | notes, mine, words)
        time.sleep(_PAUSE)


def _text(notes: dict[int, Note], mine: Note, words: Mapping[str, Callable[[int], str]]) -> str:
    """Describe the difference in this rank's operation, or else in another, whose failure has ended this one too."""
    operations = {note.operation for note in notes.values()} - {mine.operation}
    for operation in (mine.operation, *sorted(operations)):
        same = {rank: note for rank, note in notes.items() if note.operation == operation}
        if found := _differences(same, words):
            ended = "" if operation == mine.operation else " ended because another call"
            return f"{mine.kind}{ended} does not match among the ranks, expected the same on all: {found}"
    return ""


def _differences(notes: dict[int, Note], words: Mapping[str, Callable[[int], str]]) -> str:
    kinds = {rank: note.kind for rank, note in notes.items()}
    if found := difference(kinds):
        return f"which call ({found})"
    names = next(iter(notes.values())).arguments
    found_all = {
        name: difference({rank: note.arguments.get(name) for rank, note in notes.items()}, words.get(name, repr))
        for name in names
    }
    return ", ".join(f"{name} ({found})" for name, found in found_all.items() if found)
