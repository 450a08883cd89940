"""P15: an abort word that kernels read-modify-write and hosts store must be in memory where the two are atomic.

Two warps of B sum rows that A has published, each between its loads and its last look. A's host fails, notifies B, and
its user overwrites the rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from .explore import Step, with_item

LOADS, LOOKS, WRITES, OVER = range(4)  # the state of a warp
RUNS, TELLS, USER, ENDED = range(4)  # the state of A


class State(NamedTuple):
    word: bool = False  # B's abort word: A has failed
    producer: int = RUNS
    warps: tuple[int, ...] = (LOADS, LOADS)
    new: tuple[bool, ...] = (False, False)  # the row that it has loaded is no longer A's
    read: tuple[bool, ...] = (False, False)  # the word, as its look has read it
    wrong: str = ""


@dataclass(frozen=True)
class Looks:
    """Without the rule a look, which adds 0, reads the word and writes it back later."""

    near_part_is_on_the_gpu: bool = True

    def initial(self) -> State:
        return State()

    def steps(self, state: State) -> Iterator[Step[State]]:
        if state.producer == RUNS:
            yield "A's host fails", state._replace(producer=TELLS)
        elif state.producer == TELLS:
            yield "A's host stores B's abort word", state._replace(producer=USER, word=True)
        elif state.producer == USER:
            yield "A's user overwrites its rows", state._replace(producer=ENDED)
        for warp, step in enumerate(state.warps):
            if step == LOADS:
                is_new = state.producer == ENDED
                after = self._at(state, warp, LOOKS)._replace(new=with_item(state.new, warp, is_new))
                yield f"warp {warp} of B loads a row of A{', already overwritten' * is_new}", after
            elif step == LOOKS:
                read = state._replace(read=with_item(state.read, warp, state.word))
                if self.near_part_is_on_the_gpu:
                    yield f"warp {warp} of B looks at the word", self._decides(read, warp)
                else:
                    yield f"warp {warp} of B reads the word, to add 0", self._at(read, warp, WRITES)
            elif step == WRITES:
                after = self._decides(state._replace(word=state.read[warp]), warp)
                yield f"warp {warp} of B writes what it has read", after

    @staticmethod
    def _at(state: State, warp: int, step: int) -> State:
        return state._replace(warps=with_item(state.warps, warp, step))

    def _decides(self, state: State, warp: int) -> State:
        wrong = "B's operation succeeds, with rows that are not A's" if state.new[warp] and not state.read[warp] else ""
        return self._at(state, warp, OVER)._replace(wrong=wrong)

    def wrong(self, state: State) -> str | None:
        if state.wrong:
            return state.wrong
        # Later kernels of B would wait for A until they time out.
        lost = self.ended(state) and not state.word
        return "B's abort word is clear, although A has failed" if lost else None

    def ended(self, state: State) -> bool:
        return state.producer == ENDED and state.warps == (OVER, OVER)
