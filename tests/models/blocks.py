"""P14: the two warps of one block, one of which gives up."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from .explore import Step, with_item

# A warp's steps: it waits for a peer, comes to a barrier, looks whether some warp has given up, comes to a second one.
WAIT, FIRST, LOOK, SECOND, STEPS = range(5)


class Warp(NamedTuple):
    step: int = WAIT  # plus STEPS for each wait behind it
    left: bool = False


class Block(NamedTuple):
    warps: tuple[Warp, ...] = (Warp(), Warp())
    gave_up: bool = False
    decided: bool = False  # that the block leaves, by the one that looks
    freed: bool = False


@dataclass(frozen=True)
class Meetings:
    """Behind each wait the warps meet: a barrier, warp 0 looks, a barrier; then both go on, or both leave."""

    every_barrier_is_met: bool = True  # without it a warp that gives up leaves at once
    one_looks_for_all: bool = True  # without it each warp looks for itself behind the first barrier
    second_barrier: bool = True
    nothing_after_giving_up: bool = True  # without it warp 1 gives `free` whatever the last meeting has decided
    waits: int = 2  # with a meeting behind each; then warp 1 gives `free`

    def initial(self) -> Block:
        return Block()

    def steps(self, state: Block) -> Iterator[Step[Block]]:
        for w, warp in enumerate(state.warps):
            if warp.left:
                continue
            other, step, name = state.warps[1 - w], warp.step % STEPS, f"warp {w}"
            on = warp._replace(step=warp.step + 1)
            if warp.step == self.waits * STEPS:
                freed = state.freed or w == 1
                yield f"{name} {'gives `free`' if w else 'ends'}", self._with(state, w, warp, left=True, freed=freed)
            elif step == WAIT:
                number = warp.step // STEPS
                yield f"{name}'s wait {number} ends well", self._with(state, w, on)
                if not state.gave_up:  # one timeout is enough
                    leaves = not self.every_barrier_is_met
                    after = self._with(state, w, warp if leaves else on, left=leaves, gave_up=True)
                    yield f"{name}'s wait {number} times out, it gives up{' and leaves' * leaves}", after
            elif step == FIRST and other.step >= warp.step:
                yield f"{name} is behind the first barrier", self._with(state, w, on)
            elif step == LOOK:
                if not self.one_looks_for_all:
                    yield f"{name} looks: {self._says(state.gave_up)}", self._go_on(state, w, warp, state.gave_up)
                elif w == 0:
                    yield f"warp 0 looks: {self._says(state.gave_up)}", self._with(state, 0, on, decided=state.gave_up)
                else:
                    yield "warp 1 leaves the look to warp 0", self._with(state, 1, on)
            elif step == SECOND and (other.step >= warp.step or not self.second_barrier):
                text = f"{name} is behind the second barrier: {self._says(state.decided)}"
                yield text, self._go_on(state, w, warp, state.decided)

    def _says(self, leaves: bool) -> str:
        return "leave" if leaves else "go on"

    def _go_on(self, state: Block, w: int, warp: Warp, leaves: bool) -> Block:
        behind = (warp.step // STEPS + 1) * STEPS
        if behind == self.waits * STEPS and w == 1:
            leaves = leaves and self.nothing_after_giving_up
        return self._with(state, w, warp._replace(step=behind), left=leaves)

    def _with(self, state: Block, w: int, warp: Warp, left: bool = False, **changes: bool) -> Block:
        return state._replace(warps=with_item(state.warps, w, warp._replace(left=left)), **changes)

    def wrong(self, state: Block) -> str | None:
        return "the region is given back after the block has given up" if state.freed and state.gave_up else None

    def ended(self, state: Block) -> bool:
        return all(warp.left for warp in state.warps)
