"""P11: chunks that wait for slots, on ranks that wait for each other."""

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


class Block(NamedTuple):
    sent: int = 0
    summed: int = 0  # the slots of these rounds are free again
    waits_for: str = ""  # what it has begun before it could


@dataclass(frozen=True)
class Blocks:
    """A combine of A and B, each with one block. It sends its chunks to the other rank, one slot at a time, and sums
    the rounds of those that come.
    """

    sends_into_free_slots: bool = True  # without it a block may begin to send before the slot is free
    sums_what_has_come: bool = True  # without it a block may begin to sum before the round's chunk has arrived

    def initial(self) -> tuple[Block, ...]:
        return (Block(), Block())

    def steps(self, state: tuple[Block, ...]) -> Iterator[Step[tuple[Block, ...]]]:
        for r, block in enumerate(state):
            me, other = RANKS[r], state[1 - r]
            free, come = block.sent == other.summed, block.summed < other.sent
            if block.sent < CHUNKS and block.waits_for in ("", "slot"):
                if free:
                    after = block._replace(sent=block.sent + 1, waits_for="")
                    yield f"{me} sends chunk {block.sent}", with_item(state, r, after)
                elif not (self.sends_into_free_slots or block.waits_for):
                    yield (
                        f"{me} waits for the slot of chunk {block.sent}",
                        with_item(state, r, block._replace(waits_for="slot")),
                    )
            if block.summed < CHUNKS and block.waits_for in ("", "round"):
                if come:
                    after = block._replace(summed=block.summed + 1, waits_for="")
                    yield f"{me} sums round {block.summed}, gives the slot back", with_item(state, r, after)
                elif not (self.sums_what_has_come or block.waits_for):
                    yield f"{me} waits for round {block.summed}", with_item(state, r, block._replace(waits_for="round"))

    def wrong(self, state: tuple[Block, ...]) -> str | None:
        return None

    def ended(self, state: tuple[Block, ...]) -> bool:
        return all(block.sent == block.summed == CHUNKS for block in state)
