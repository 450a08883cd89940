"""P17: C is masked in the middle of an operation. A's host has timed out waiting for it; B continues without it.

C reads the rows that B has written into its own region, and has a chunk in flight to B. Two blocks of B decide whether
C's data counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from .explore import Step, with_item

NOT_SENT, ON_ITS_WAY, THERE, DROPPED = range(4)  # the chunk
UNDECIDED, IN, OUT = range(3)  # the decision of a block of B about C
GOING, WELL, FAILED = range(3)  # the outcome of C's operation
NOTHING = -1


class State(NamedTuple):
    """The progress of the three ranks."""

    told_c: bool = False
    told_b: bool = False
    chunk: int = NOT_SENT
    blocks: tuple[int, int] = (UNDECIDED, UNDECIDED)
    b_is_at: int = 0  # B's operation: in operation 1 its region holds other rows, and it expects other chunks there
    mixed: bool = False  # C's chunk has arrived in B's operation 1
    loaded: int = NOTHING  # the operation of B whose rows C has loaded
    c: int = GOING
    b_failed: bool = False


@dataclass(frozen=True)
class Masking:
    """Hosts announce masks; each store is one step."""

    told_first: bool = True
    looks_last: bool = True
    decided_once: bool = True
    closes_the_connection: bool = True
    tells_itself_alone: bool = True

    def initial(self) -> State:
        return State()

    def steps(self, state: State) -> Iterator[Step[State]]:
        yield from self._a(state)
        yield from self._b(state)
        yield from self._c(state)
        if state.chunk == ON_ITS_WAY:
            yield "C's chunk arrives at B", state._replace(chunk=THERE, mixed=state.b_is_at == 1)

    def _a(self, state: State) -> Iterator[Step[State]]:
        if not state.told_c:
            yield "A's host masks C, notifies it", state._replace(told_c=True)
        if not state.told_b and (state.told_c or not self.told_first):
            chunk = DROPPED if self.closes_the_connection and state.chunk == ON_ITS_WAY else state.chunk
            yield "A's host notifies B", state._replace(told_b=True, chunk=chunk)

    def _b(self, state: State) -> Iterator[Step[State]]:
        for i in range(2):
            if state.blocks[i] != UNDECIDED or not (state.told_b or state.chunk == THERE):
                continue
            other = state.blocks[1 - i]
            mine = other if self.decided_once and other != UNDECIDED else OUT if state.told_b else IN
            yield f"block {i} of B decides", state._replace(blocks=with_item(state.blocks, i, mine))
        if state.b_is_at == 0 and UNDECIDED not in state.blocks and (state.told_b or state.c == WELL):
            yield "B begins operation 1, writes its rows", state._replace(b_is_at=1)

    def _c(self, state: State) -> Iterator[Step[State]]:
        if state.c != GOING:
            return
        if state.chunk == NOT_SENT and state.loaded == NOTHING:
            closed = self.closes_the_connection and state.told_b
            yield "C sends its chunk", state._replace(chunk=DROPPED if closed else ON_ITS_WAY)
        if state.chunk != NOT_SENT and state.loaded == NOTHING:
            yield "C loads B's rows", state._replace(loaded=state.b_is_at)
        if state.loaded != NOTHING and self.looks_last and state.told_c:
            b_failed = not self.tells_itself_alone
            yield "C finds that it is masked", state._replace(c=FAILED, b_failed=b_failed)
        elif state.loaded != NOTHING:
            yield "C ends well", state._replace(c=WELL)

    def wrong(self, state: State) -> str | None:
        if state.c == WELL and state.loaded == 1:
            return "C ends well with rows of B's operation 1"
        if UNDECIDED not in state.blocks and state.blocks[0] != state.blocks[1]:
            return "one block of B places C's rows, the other leaves them out"
        if state.mixed:
            return "C's chunk of operation 0 is in B's operation 1"
        return "B fails, although it continued without C" if state.b_failed else None

    def ended(self, state: State) -> bool:
        return state.b_is_at == 1 and state.c != GOING
