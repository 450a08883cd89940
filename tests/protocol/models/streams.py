"""P11: chunks that wait for slots, on three ranks that wait for each other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from .explore import RANKS, Step, with_item

CHUNKS = 2  # of each stream


class Stream(NamedTuple):
    sent: int = 0
    arrived: int = 0
    placed: int = 0  # the slot is free again


@dataclass(frozen=True)
class Dispatch:
    """A sends to B, B to C and C to A; each stream has one slot. One warp of each rank both sends and places
    arrivals."""

    polls: bool = True  # without it the warp waits for the slot of its next chunk before it checks for arrivals

    def initial(self) -> tuple[Stream, ...]:
        return (Stream(),) * len(RANKS)

    def steps(self, state: tuple[Stream, ...]) -> Iterator[Step[tuple[Stream, ...]]]:
        for r, stream in enumerate(state):
            me, to, coming = RANKS[r], RANKS[(r + 1) % len(RANKS)], state[r - 1]
            if stream.sent < CHUNKS and stream.placed == stream.sent:
                after = with_item(state, r, stream._replace(sent=stream.sent + 1))
                yield f"{me} finds its slot at {to} free, sends chunk {stream.sent}", after
            if stream.arrived < stream.sent:
                after = with_item(state, r, stream._replace(arrived=stream.sent))
                yield f"chunk {stream.arrived} of {me} arrives at {to}", after
            if coming.placed < coming.arrived and (self.polls or stream.sent == CHUNKS):
                after = with_item(state, (r - 1) % len(RANKS), coming._replace(placed=coming.arrived))
                yield f"{me} places chunk {coming.placed} of {RANKS[r - 1]}, gives the slot back", after

    def wrong(self, state: tuple[Stream, ...]) -> str | None:
        return None

    def ended(self, state: tuple[Stream, ...]) -> bool:
        return all(stream.placed == CHUNKS for stream in state)


class Rounds(NamedTuple):
    sent: tuple[int, ...] = (0, 0)  # by B and by C
    arrived: tuple[int, ...] = (0, 0)
    summed: int = 0


@dataclass(frozen=True)
class Combine:
    """B and C send chunks to A, which sums round k, and gives slots back, when chunk k of both is there."""

    slot_for_each_stream: bool = True  # without it B and C share one, which belongs to the first to arrive

    def initial(self) -> Rounds:
        return Rounds()

    def steps(self, state: Rounds) -> Iterator[Step[Rounds]]:
        for p in range(2):
            name, k = RANKS[p + 1], state.sent[p]
            taken = k - state.summed if self.slot_for_each_stream else sum(state.sent) - 2 * state.summed
            if k < CHUNKS and not taken:
                yield f"{name} finds a slot free, sends chunk {k}", state._replace(sent=with_item(state.sent, p, k + 1))
            if state.arrived[p] < k:
                yield f"chunk {k - 1} of {name} arrives", state._replace(arrived=with_item(state.arrived, p, k))
        if min(state.arrived) > state.summed:
            yield f"A sums round {state.summed}, gives the slots back", state._replace(summed=state.summed + 1)

    def wrong(self, state: Rounds) -> str | None:
        return None

    def ended(self, state: Rounds) -> bool:
        return state.summed == CHUNKS
