"""P1 and P3: two ranks begin operations in one order and finish them in one order, but interleave the two freely."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from .explore import RANKS, Step, with_item

REGIONS = 2


class Rank(NamedTuple):
    queued: tuple[tuple[str, int], ...] = ()  # kernels on the stream: the begin or the finish of a call
    ran: int = 0  # number of them that have ended
    half: bool = False  # the next one has sent, and waits for the peer's data

    def calls(self, kind: str) -> list[int]:
        """Return the calls whose begins, or finishes, its host has queued, in order; for begins that is by number."""
        return [call for what, call in self.queued if what == kind]

    def number(self, call: int) -> int:
        return self.calls("begin").index(call)

    def open(self) -> list[int]:
        """Return the numbers of operations begun and not finished."""
        return [n for n, call in enumerate(self.calls("begin")) if call not in self.calls("finish")]

    def has(self, kind: str, number: int, sent_is_enough: bool) -> bool:
        """Return whether the begin or finish of a number has ended here, or has at least sent the data that the peer
        awaits."""
        begun = self.calls("begin")
        if number >= len(begun) or (kind, begun[number]) not in self.queued:
            return False
        place = self.queued.index((kind, begun[number]))
        return place < self.ran or (place == self.ran and self.half and sent_is_enough)


State = tuple[Rank, ...]


@dataclass(frozen=True)
class Orders:
    """Kernels run one after the other on each rank's stream. A begin waits for `free` and sends counts. A finish waits
    for counts, sends rows, and waits for the peer's; its end gives the region back.
    """

    begins_in_one_order: bool = True
    finishes_in_one_order: bool = True
    begin_waits_for_no_begin: bool = True
    refuses_behind_an_open_one: bool = True  # P3
    refuses_by_number: bool = True  # P3; without it by the number of open operations
    calls: int = 3

    def initial(self) -> State:
        return Rank(), Rank()

    def steps(self, state: State) -> Iterator[Step[State]]:
        for r, rank in enumerate(state):
            for kind, call in self._may_queue(rank, state[1 - r]):
                queued = (*rank.queued, (kind, call))
                number = rank._replace(queued=queued).number(call)
                yield (
                    f"{RANKS[r]}'s host queues the {kind} of call {call}, operation {number}",
                    with_item(state, r, rank._replace(queued=queued)),
                )
            yield from self._runs(r, rank, state)

    def _may_queue(self, rank: Rank, peer: Rank) -> Iterator[tuple[str, int]]:
        begun, finished = rank.calls("begin"), rank.calls("finish")
        number, still_open = len(begun), rank.open()
        refused = number - REGIONS in still_open if self.refuses_by_number else len(still_open) >= REGIONS
        if not (self.refuses_behind_an_open_one and refused):
            for call in [number] if self.begins_in_one_order else range(self.calls):
                if call < self.calls and call not in begun:
                    yield "begin", call
        theirs = peer.calls("finish")
        for n in still_open:
            agreed = len(finished) >= len(theirs) or theirs[len(finished)] == begun[n]
            if agreed or not self.finishes_in_one_order:
                yield "finish", begun[n]

    def _runs(self, r: int, rank: Rank, state: State) -> Iterator[Step[State]]:
        if rank.ran == len(rank.queued):
            return
        kind, call = rank.queued[rank.ran]
        number, peer = rank.number(call), state[1 - r]
        done, half = rank._replace(ran=rank.ran + 1, half=False), rank._replace(half=True)
        if kind == "begin":
            if not rank.half and all(n.has("finish", number - REGIONS, False) for n in state if number >= REGIONS):
                follows = done if self.begin_waits_for_no_begin else half
                yield f"{RANKS[r]}'s begin of {number} finds `free`, sends counts", with_item(state, r, follows)
            if rank.half and peer.has("begin", number, True):
                yield f"{RANKS[r]}'s begin of {number} has the peer's counts", with_item(state, r, done)
        elif not rank.half and peer.has("begin", number, True):
            yield f"{RANKS[r]}'s finish of {number} has the counts, sends rows", with_item(state, r, half)
        elif rank.half and peer.has("finish", number, True):
            yield f"{RANKS[r]}'s finish of {number} has the rows, gives `free`", with_item(state, r, done)

    def wrong(self, state: State) -> str | None:
        for r, rank in enumerate(state):
            for number, (mine, theirs) in enumerate(zip(rank.calls("begin"), state[1 - r].calls("begin"))):
                if mine != theirs and rank.has("finish", number, True):
                    return f"{RANKS[r]} takes the peer's counts of call {theirs} for those of call {mine}"
        return None

    def ended(self, state: State) -> bool:
        return all(rank.ran == 2 * self.calls for rank in state)


class Replayed(NamedTuple):
    """For one rank: the replay whose rows it has sent, received and read, and the contents of its one region."""

    sent: int = -1
    read: int = -1
    lies: int = -1


@dataclass(frozen=True)
class Replays:
    """Two ranks replay a graph twice. It was captured when the next number was 0. There is a single region."""

    number_in_device_memory: bool = True  # without it the graph uses 0 each time

    def initial(self) -> tuple[Replayed, ...]:
        return Replayed(), Replayed()

    def steps(self, state: tuple[Replayed, ...]) -> Iterator[Step[tuple[Replayed, ...]]]:
        for r, rank in enumerate(state):
            peer, replay = state[1 - r], rank.sent + 1
            number = replay if self.number_in_device_memory else 0
            if rank.read == rank.sent and replay < 2 and all(other.read >= number - 1 for other in state):
                after = with_item(state, r, rank._replace(sent=replay))
                after = with_item(after, 1 - r, peer._replace(lies=replay))
                yield f"{RANKS[r]}'s replay {replay} works as operation {number}: stores rows", after
            elif rank.read < rank.sent <= peer.sent:
                yield (
                    f"{RANKS[r]}'s replay {rank.sent} has its signal, reads, gives `free`",
                    with_item(state, r, rank._replace(read=rank.lies)),
                )

    def wrong(self, state: tuple[Replayed, ...]) -> str | None:
        for r, rank in enumerate(state):
            if rank.read > rank.sent:
                return f"{RANKS[r]} reads the rows of replay {rank.read} for those of replay {rank.sent}"
        return None

    def ended(self, state: tuple[Replayed, ...]) -> bool:
        return all(rank.read == 1 for rank in state)
