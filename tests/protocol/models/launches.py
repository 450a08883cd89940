"""P1: kernels run in the order of their launches on whichever streams; a call's ticket outlives the blocks that use
it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from .explore import Step, with_item

CALLS = 2
BLOCKS = 2


class Launched(NamedTuple):
    """A rank that makes its calls on two streams by turns; the program's own kernel is on the first."""

    users_run: bool = True
    launched: int = 0
    numbers: tuple[int | None, ...] = (None,) * CALLS  # of the calls whose kernels have run


@dataclass(frozen=True)
class Streams:
    """The peer makes the calls on one stream, so that there call n is operation n."""

    in_launch_order: bool = True

    def initial(self) -> Launched:
        return Launched()

    def steps(self, state: Launched) -> Iterator[Step[Launched]]:
        if state.users_run:
            yield "the program's kernel ends on stream 0", state._replace(users_run=False)
        if state.launched < CALLS:
            yield (
                f"A's host launches call {state.launched} on stream {state.launched}",
                state._replace(launched=state.launched + 1),
            )
        taken = sum(number is not None for number in state.numbers)
        for call in range(state.launched):
            behind_users = call == 0 and state.users_run
            behind_launch = self.in_launch_order and call > 0 and state.numbers[call - 1] is None
            if state.numbers[call] is None and not behind_users and not behind_launch:
                text = f"A's kernel of call {call} runs and takes number {taken}"
                yield text, state._replace(numbers=with_item(state.numbers, call, taken))

    def wrong(self, state: Launched) -> str | None:
        for call, number in enumerate(state.numbers):
            if number not in (None, call):
                return f"A's call {call} takes the peer's rows of call {number}"
        return None

    def ended(self, state: Launched) -> bool:
        return None not in state.numbers


class Block(NamedTuple):
    """A block of the kernel that runs."""

    gives_up: bool = False
    works: bool = True
    counted: bool = False


class Lent(NamedTuple):
    """A ticket: the call that has it, the kernel that uses it, and how many of its blocks have left."""

    owner: int = 0
    runs: int = 0
    left: int = 0
    gave_up: int = 0  # of those
    finishing: int = -1  # the block that goes on to finish the operation
    told: int = -1  # the latest call that the host was told has ended
    blocks: tuple[Block, ...] = (Block(), Block())


@dataclass(frozen=True)
class Tickets:
    """Two calls one after the other with one ticket, which the host gives to the second when the first has ended.

    A block works with the ticket and counts itself among those that have left. The last one finishes the operation, if
    none has given up, and tells the host. The second block of the second call gives up.
    """

    last_block_tells: bool = True
    counts_blocks_that_gave_up: bool = True
    counts_them_apart: bool = True
    finishes_before_it_tells: bool = True
    counts_from_zero: bool = True

    def initial(self) -> Lent:
        return Lent()

    def steps(self, state: Lent) -> Iterator[Step[Lent]]:
        for b, block in enumerate(state.blocks):
            if block.works:
                after = state._replace(blocks=with_item(state.blocks, b, block._replace(works=False)))
                yield f"block {b} of call {state.runs} is done with its part", after
            elif not block.counted and (self.counts_blocks_that_gave_up or not block.gives_up):
                yield self._leaves(state, b, block)
        if state.finishing >= 0:
            after = state._replace(finishing=-1)
            text = f"block {state.finishing} of call {state.runs} has finished the operation"
            yield text, self._told(after) if self.finishes_before_it_tells else after
        if state.told == state.owner and state.owner + 1 < CALLS:
            yield "the host gives the ticket to the next call", state._replace(owner=state.owner + 1)
        busy = state.finishing >= 0 or any(block.works for block in state.blocks)
        if state.runs < state.owner and not busy:
            yield "its kernel begins", state._replace(runs=state.owner, blocks=(Block(), Block(gives_up=True)))

    def _told(self, state: Lent) -> Lent:
        again = {"left": 0, "gave_up": 0} if self.counts_from_zero else {}
        return state._replace(told=state.runs, **again)

    def _leaves(self, state: Lent, b: int, block: Block) -> Step[Lent]:
        left, gave_up = state.left + 1, state.gave_up + (block.gives_up and self.counts_them_apart)
        blocks = with_item(state.blocks, b, block._replace(counted=True))
        state = state._replace(blocks=blocks, left=left, gave_up=gave_up)
        if left != BLOCKS:
            text = f"block {b} of call {state.runs} leaves"
            return (
                (text, state)
                if self.last_block_tells
                else (f"{text} and tells the host", state._replace(told=state.runs))
            )
        if gave_up != 0 or block.gives_up:
            return f"block {b} of call {state.runs} leaves and tells the host", self._told(state)
        after = state._replace(finishing=b)
        text = f"block {b} of call {state.runs}, the last one, goes on"
        return (text, after) if self.finishes_before_it_tells else (f"{text} and tells the host", self._told(after))

    def wrong(self, state: Lent) -> str | None:
        if state.finishing >= 0 and any(block.gives_up for block in state.blocks):
            return f"call {state.runs}, which a block has given up, is finished"
        if state.owner != state.runs and (state.finishing >= 0 or any(block.works for block in state.blocks)):
            return f"a block of call {state.runs} uses the ticket of call {state.owner}"
        return None

    def ended(self, state: Lent) -> bool:
        return state.told == CALLS - 1
