"""P14: the two warps of one block, one of which gives up, and what they do next."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from .explore import Step, with_item

# A warp's steps: it waits for a peer; checks whether some warp has given up and arrives at a barrier; leaves it.
WAIT, ARRIVE, LEAVE, STEPS = range(4)


class Warp(NamedTuple):
    step: int = WAIT  # plus STEPS for each wait completed
    left: bool = False
    brought: tuple[bool, ...] = ()  # for each barrier reached: whether it reported that some warp has given up


class Block(NamedTuple):
    warps: tuple[Warp, ...] = (Warp(), Warp())
    gave_up: bool = False
    freed: bool = False


@dataclass(frozen=True)
class Barriers:
    """After each wait the warps wait at a barrier. It tells both whether either has reported that some warp has given
    up; then both continue, or both leave.
    """

    every_barrier_is_met: bool = True  # without it a warp that gives up leaves at once
    looks_behind_its_wait: bool = True  # without it a warp reports what it saw before its wait
    barrier_joins_answers: bool = True  # without it each warp checks for itself after the barrier
    nothing_after_giving_up: bool = True  # without it warp 1 gives `free` whatever the last barrier has decided
    waits: int = 2  # with a barrier after each; then warp 1 gives `free`

    def initial(self) -> Block:
        return Block()

    def steps(self, state: Block) -> Iterator[Step[Block]]:
        for w, warp in enumerate(state.warps):
            if warp.left:
                continue
            other, number, step, name = state.warps[1 - w], warp.step // STEPS, warp.step % STEPS, f"warp {w}"
            if number == self.waits:
                freed = state.freed or w == 1
                yield f"{name} {'gives `free`' if w else 'ends'}", self._with(state, w, warp, left=True, freed=freed)
            elif step == WAIT:
                on = warp._replace(step=warp.step + 1)
                early = on._replace(brought=(*warp.brought, state.gave_up))
                on = on if self.looks_behind_its_wait else early
                yield f"{name}'s wait {number} ends well", self._with(state, w, on)
                if not state.gave_up:  # one timeout is enough
                    leaves = not self.every_barrier_is_met
                    after = self._with(state, w, warp if leaves else on, left=leaves, gave_up=True)
                    yield f"{name}'s wait {number} times out, it gives up{' and leaves' * leaves}", after
            elif step == ARRIVE:
                on = warp._replace(step=warp.step + 1)
                if self.looks_behind_its_wait:
                    on = on._replace(brought=(*warp.brought, state.gave_up))
                yield f"{name} checks, and arrives at the barrier", self._with(state, w, on)
            elif other.step >= warp.step:
                either = warp.brought[number] or other.brought[number]
                leaves = either if self.barrier_joins_answers else state.gave_up
                text = f"{name} has passed the barrier: {'leave' if leaves else 'continue'}"
                if number == self.waits - 1 and w == 1:
                    leaves = leaves and self.nothing_after_giving_up
                yield text, self._with(state, w, warp._replace(step=(number + 1) * STEPS), left=leaves)

    def _with(self, state: Block, w: int, warp: Warp, left: bool = False, **changes: bool) -> Block:
        return state._replace(warps=with_item(state.warps, w, warp._replace(left=left)), **changes)

    def wrong(self, state: Block) -> str | None:
        return "the region is given back after the block has given up" if state.freed and state.gave_up else None

    def ended(self, state: Block) -> bool:
        return all(warp.left for warp in state.warps)


class Turn(NamedTuple):
    arrived: bool = False
    decided: tuple[bool | None, ...] = (None, None)  # by each warp: whether it places the chunk
    done: tuple[bool, ...] = (False, False)


@dataclass(frozen=True)
class Turns:
    """A block places a chunk if it has arrived, each warp a part of it; then it gives the slot back."""

    one_warp_decides: bool = True  # without it each warp looks whether the chunk has arrived

    def initial(self) -> Turn:
        return Turn()

    def steps(self, state: Turn) -> Iterator[Step[Turn]]:
        if not state.arrived:
            yield "the chunk arrives", state._replace(arrived=True)
        for w, decided in enumerate(state.decided):
            if decided is None and (w == 0 or not self.one_warp_decides):
                both = (state.arrived,) * 2 if self.one_warp_decides else with_item(state.decided, w, state.arrived)
                yield (
                    f"warp {w} looks, and decides to {'place it' if state.arrived else 'go on'}",
                    state._replace(decided=both),
                )
            elif decided is not None and not state.done[w]:
                yield f"warp {w} has done its part", state._replace(done=with_item(state.done, w, True))
        if all(state.done) and not all(state.decided):
            yield "the block takes its next turn", state._replace(decided=(None, None), done=(False, False))

    def wrong(self, state: Turn) -> str | None:
        if all(state.done) and len(set(state.decided)) == 2:
            return "the slot is given back with rows left in it"
        return None

    def ended(self, state: Turn) -> bool:
        return all(state.done) and all(state.decided)
