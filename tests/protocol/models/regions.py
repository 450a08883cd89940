"""P2 and P4: when a rank may store into a region, and when its owner may give it back.

Every operation is the same. A sender builds a message in its own region, from which its NIC transfers it to the
receiver's region; publishes rows in its own region, which the receiver loads; and sends an offer to the receiver's
region, which is used only in the last operation. Contents are identified by the operation that they belong to.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from .explore import RANKS, Step, with_item

BUILT, SENT, TAKEN, LOADED = 1, 2, 4, 8  # the completed steps of a rank's operation
Cells = tuple[int, ...]  # one for each region
Put = tuple[int, str, int, int]  # destination, kind, operation, operation that the content really belongs to


class Rank(NamedTuple):
    operation: int
    done: int
    freed: int  # number of operations that have given their region back
    built: Cells
    published: Cells
    message: Cells
    offer: Cells
    rows: Cells  # how often the peer has reported that it has published
    messages: Cells  # number that have arrived
    offers: Cells
    read: Cells  # how often the peer has reported that it has loaded
    to_send: tuple[int, ...] = ()  # operations whose message the NIC has yet to read


class State(NamedTuple):
    ranks: tuple[Rank, ...]
    wire: tuple[Put, ...] = ()
    wrong: str = ""

    def with_rank(self, r: int, **changes: Any) -> State:
        return self._replace(ranks=with_item(self.ranks, r, self.ranks[r]._replace(**changes)))

    def with_put(self, put: Put) -> State:
        return self._replace(wire=tuple(sorted((*self.wire, put))))


@dataclass(frozen=True)
class Regions:
    """The rules of P4, that of P2, then the sizes. With one sender, A sends to B."""

    waits_for_free: bool = True
    everything_has_arrived: bool = True
    has_read: bool = True
    readers_are_done: bool = True
    own_sends_are_done: bool = True
    lies_in_its_region: bool = True  # without it each operation is at the beginning of the first region
    regions: int = 1
    operations: int = 2
    senders: int = 1

    def initial(self) -> State:
        empty, none = (-1,) * self.regions, (0,) * self.regions
        return State((Rank(0, 0, 0, empty, empty, empty, empty, none, none, none, none),) * 2)

    def steps(self, state: State) -> Iterator[Step[State]]:
        for r, rank in enumerate(state.ranks):
            if rank.operation < self.operations:
                yield from self._sends(r, rank, state)
                yield from self._receives(r, rank, state)
                yield from self._ends(r, rank, state)
            for n in rank.to_send:
                after = state.with_rank(r, to_send=tuple(other for other in rank.to_send if other != n))
                yield (
                    f"{RANKS[r]}'s NIC reads the message of {n}",
                    after.with_put((1 - r, "message", n, rank.built[self._place(n)])),
                )
        for put in state.wire:
            to, what, n, content = put
            after = state._replace(wire=tuple(other for other in state.wire if other != put))
            cells = with_item(getattr(state.ranks[to], what), self._place(n), content)
            yield f"the {what} of {n} arrives at {RANKS[to]}", self._count(after, to, f"{what}s", n, **{what: cells})

    def _place(self, operation: int) -> int:
        return operation % self.regions if self.lies_in_its_region else 0

    def _count(self, state: State, r: int, what: str, operation: int, **changes: Any) -> State:
        counts, word = getattr(state.ranks[r], what), operation % self.regions
        return state.with_rank(r, **{what: with_item(counts, word, counts[word] + 1)}, **changes)

    def _sends(self, r: int, rank: Rank, state: State) -> Iterator[Step[State]]:
        n, name, place = rank.operation, f"{RANKS[r]}'s operation {rank.operation}", self._place(rank.operation)
        if r >= self.senders:
            return
        # Its own region is free: its operation n - D has ended, as operations of one rank run one after the other.
        if not rank.done & BUILT:
            built, published = with_item(rank.built, place, n), with_item(rank.published, place, n)
            after = state.with_rank(r, done=rank.done | BUILT, built=built, published=published)
            yield f"{name} builds its message and publishes rows", after
        free = state.ranks[1 - r].freed > n - self.regions or not self.waits_for_free
        if rank.done & BUILT and not rank.done & SENT and free:
            after = state.with_rank(r, done=rank.done | SENT, to_send=(*rank.to_send, n)).with_put(
                (1 - r, "offer", n, n)
            )
            yield f"{name} posts its message, sends an offer, signals its rows", self._count(after, 1 - r, "rows", n)

    def _receives(self, r: int, rank: Rank, state: State) -> Iterator[Step[State]]:
        n, name, place = rank.operation, f"{RANKS[r]}'s operation {rank.operation}", self._place(rank.operation)
        word, uses, takes_offer = n % self.regions, n // self.regions + 1, n == self.operations - 1
        if 1 - r >= self.senders:
            return
        arrived = rank.messages[word] >= uses and (rank.offers[word] >= uses or not takes_offer)
        if not rank.done & TAKEN and arrived:
            seen = [("message", rank.message[place]), *[("offer", rank.offer[place])] * takes_offer]
            texts = [f"{name} takes the {what} of {m} for its own" for what, m in seen if m != n]
            after = state.with_rank(r, done=rank.done | TAKEN)._replace(wrong="".join(texts[:1]))
            yield f"{name} reads its message{' and its offer' * takes_offer}", after
        if not rank.done & LOADED and rank.rows[word] >= uses:
            after = self._count(state.with_rank(r, done=rank.done | LOADED), 1 - r, "read", n)
            if (loaded := state.ranks[1 - r].published[place]) != n:
                after = after._replace(wrong=f"{name} loads the peer's rows of {loaded} for its own")
            yield f"{name} loads the peer's rows, reports that it is done", after

    def _ends(self, r: int, rank: Rank, state: State) -> Iterator[Step[State]]:
        n, word, uses = rank.operation, rank.operation % self.regions, rank.operation // self.regions + 1
        sends, receives = r < self.senders, 1 - r < self.senders
        all_read = (TAKEN | LOADED) * receives
        may_free = (
            not (sends and not rank.done & SENT)
            and not (self.has_read and rank.done & all_read != all_read)
            and not (self.readers_are_done and sends and rank.read[word] < uses)
            and not (self.own_sends_are_done and n in rank.to_send)
            and not (self.everything_has_arrived and receives and min(rank.messages[word], rank.offers[word]) < uses)
        )
        if rank.freed == n and may_free:
            yield f"{RANKS[r]}'s operation {n} gives `free`", state.with_rank(r, freed=n + 1)
        if rank.freed > n and rank.done & all_read == all_read:
            yield f"{RANKS[r]}'s operation {n} ends", state.with_rank(r, operation=n + 1, done=0)

    def wrong(self, state: State) -> str | None:
        return state.wrong or None

    def ended(self, state: State) -> bool:
        return all(rank.operation == self.operations for rank in state.ranks)
