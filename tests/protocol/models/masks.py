"""P17: three ranks, each of which leaves out some others.

Two ranks that leave each other out exchange nothing, so no count can tell them; recovery of a Buffer ensures that a
rank which is left out has exited.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from .explore import RANKS, Step, with_item

ALL = range(len(RANKS))
UNSET = -1
SETTLED, COUNTED, SENDS, WELL, FAILED = range(5)  # progress of a rank: mask chosen, counts sent, rows sent, ended


class Rank(NamedTuple):
    mask: int = UNSET  # bit set of ranks that it leaves out
    step: int = SETTLED
    told: bool = False


State = tuple[Rank, ...]


@dataclass(frozen=True)
class Masks:
    """A rank that every other leaves out has exited. A wait for a rank that does not send to the waiting one times
    out."""

    counts_carry_the_mask: bool = True
    left_out_are_not_waited_for: bool = True

    def initial(self) -> State:
        return (Rank(),) * len(RANKS)

    def steps(self, state: State) -> Iterator[Step[State]]:
        unset = next((r for r in ALL if state[r].mask == UNSET), None)
        if unset is not None:
            for mask in range(1 << len(RANKS)):
                if not mask >> unset & 1:
                    text = f"{RANKS[unset]} leaves out {self._names(mask) or 'no rank'}"
                    yield text, with_item(state, unset, state[unset]._replace(mask=mask))
            return
        for r in ALL:
            if not self._gone(r, state) and state[r].step < WELL:
                yield from self._goes_on(r, state[r], state)

    def _names(self, mask: int) -> str:
        return " and ".join(RANKS[r] for r in ALL if mask >> r & 1)

    def _gone(self, r: int, state: State) -> bool:
        return all(state[q].mask >> r & 1 for q in ALL if q != r)

    def _goes_on(self, r: int, rank: Rank, state: State) -> Iterator[Step[State]]:
        name = RANKS[r]
        awaited = [q for q in ALL if q != r and not (self.left_out_are_not_waited_for and rank.mask >> q & 1)]
        silent = [q for q in awaited if self._gone(q, state) or state[q].mask >> r & 1]
        if rank.step == SETTLED:
            yield f"{name} sends counts", self._with(state, r, step=COUNTED)
            return
        counted = [q for q in awaited if q not in silent and state[q].step != SETTLED]
        differing = [q for q in counted if state[q].mask != rank.mask] if self.counts_carry_the_mask else []
        if rank.step == COUNTED and differing:
            yield f"{name} finds another mask in {RANKS[differing[0]]}'s counts, notifies all", self._fails(state, r)
        elif rank.step == COUNTED and counted == awaited:
            yield f"{name} has all counts, sends rows", self._with(state, r, step=SENDS)
        elif rank.step == SENDS and all(SENDS <= state[q].step <= WELL for q in awaited):
            yield f"{name} has all rows, succeeds", self._with(state, r, step=WELL)
        if rank.told:
            yield f"{name} is notified, fails", self._fails(state, r)
        elif silent:
            yield f"{name} times out waiting for {RANKS[silent[0]]}, fails", self._fails(state, r)

    def _with(self, state: State, r: int, **changes: Any) -> State:
        return with_item(state, r, state[r]._replace(**changes))

    def _fails(self, state: State, r: int) -> State:
        told = tuple(rank._replace(told=rank.told or not state[r].mask >> q & 1) for q, rank in enumerate(state))
        return self._with(told, r, step=FAILED)

    def wrong(self, state: State) -> str | None:
        well = [r for r in ALL if state[r].step == WELL]
        for r in well:
            for q in well:
                mine, theirs = state[r].mask, state[q].mask
                if mine != theirs and not (mine >> q & 1 or theirs >> r & 1):
                    without = [self._names(mask) or "no rank" for mask in (mine, theirs)]
                    return f"{RANKS[r]} and {RANKS[q]} end well, one leaves out {without[0]}, the other {without[1]}"
        there = [rank for r, rank in enumerate(state) if not self._gone(r, state)]
        if any(rank.step == FAILED for rank in there) and len({rank.mask for rank in there}) == 1:
            return "all leave out the same, and yet one fails"
        return None

    def ended(self, state: State) -> bool:
        return all(self._gone(r, state) or state[r].step >= WELL for r in ALL)
