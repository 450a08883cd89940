"""P16: two ranks recover while replays of a graph are queued, and while a put of the old generation is in flight.

A generation's words are in one of two banks: generation 1's in bank 1, 2's in bank 0, 3's in bank 1 again. Attempt n to
recover begins generation n + 1. A rank that times out waiting for the other's call to recover makes another attempt,
and the other joins that one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from .explore import RANKS, Step, with_item

WORKS, STOPS, STOPPED, MET, CLEARED, MET_AGAIN, STORES, DONE = range(8)  # the progress of a host
BANKS, OPERATIONS = 2, 2  # operations of a generation
EMPTY = -1
REPLAYS = 2  # the first is queued before the recovery, the second after it


class Rank(NamedTuple):
    host: int = WORKS
    attempt: int = 1
    generation: int = 1  # as seen by its kernels
    number: int = 0
    replay: int = 0  # the running one, or the next to start
    runs_as: int = EMPTY  # its number, while it waits for the peer's signal
    aborted: bool = False  # its abort word is set, for generation 1
    put: bool = True  # one of generation 1 is in flight to the peer
    words: tuple[int, ...] = (EMPTY,) * BANKS * OPERATIONS  # by operation: the replay that the peer's signal comes from
    left_over: bool = False  # that put has added to a word of bank 1


State = tuple[Rank, ...]


def word_of(generation: int, number: int) -> int:
    return generation % BANKS * OPERATIONS + number


@dataclass(frozen=True)
class Recovery:
    """The steps of a rank's recovery."""

    sets_own_abort_word: bool = True
    waits_for_replays: bool = True  # without it for a running kernel, not for queued ones
    makes_network_anew: bool = True
    first_meeting: bool = True
    second_meeting: bool = True
    one_store: bool = True  # without it the generation first, then the number

    def initial(self) -> State:
        return Rank(), Rank()

    def steps(self, state: State) -> Iterator[Step[State]]:
        for r, rank in enumerate(state):
            yield from self._replays(r, rank, state)
            for text, changes in self._recovers(rank, state[1 - r]):
                yield f"{RANKS[r]} {text}", with_item(state, r, rank._replace(**changes))
            if rank.put:
                after = with_item(state, r, rank._replace(put=False))
                after = with_item(after, 1 - r, after[1 - r]._replace(left_over=True))
                yield f"{RANKS[r]}'s put of generation 1 arrives", after
        b = state[1]
        if b.host == WORKS and b.replay == 0 and b.runs_as == EMPTY:
            yield "B's caller fails instead of its replay 0", with_item(state, 1, b._replace(replay=1))

    def _replays(self, r: int, rank: Rank, state: State) -> Iterator[Step[State]]:
        name, peer, over = f"{RANKS[r]}'s replay {rank.replay}", state[1 - r], rank._replace(replay=rank.replay + 1)
        leaves = rank.aborted and rank.generation == 1
        if rank.runs_as != EMPTY:
            has_signal = rank.words[word_of(rank.generation, rank.runs_as)] != EMPTY
            if leaves or has_signal:
                yield f"{name} {'ends' if has_signal else 'leaves'}", with_item(state, r, over._replace(runs_as=EMPTY))
        elif rank.replay == 0 or (rank.replay == 1 and rank.generation > 1):
            if leaves:
                yield f"{name} leaves at once", with_item(state, r, over)
            else:
                after = with_item(state, r, rank._replace(runs_as=rank.number, number=rank.number + 1))
                words = with_item(peer.words, word_of(rank.generation, rank.number), rank.replay)
                text = f"{name} runs as operation {rank.number} of generation {rank.generation}: signals"
                yield text, with_item(after, 1 - r, peer._replace(words=words))

    def _recovers(self, rank: Rank, peer: Rank) -> Iterator[tuple[str, dict[str, Any]]]:
        generation = rank.attempt + 1
        if rank.host == WORKS:
            text = "begins to recover" + ": sets its abort word" * self.sets_own_abort_word
            yield text, {"host": STOPS, "attempt": peer.attempt, "aborted": self.sets_own_abort_word}
        if rank.host == STOPS and (rank.replay > 0 or (not self.waits_for_replays and rank.runs_as == EMPTY)):
            anew = self.makes_network_anew
            text = f"has waited for its kernels{', makes its network anew' * anew}"
            yield text, {"host": STOPPED, "put": rank.put and not anew}
        waits_at = STOPPED if self.first_meeting else CLEARED
        if rank.host == waits_at and peer.host == WORKS and rank.attempt == 1:
            yield "has timed out, makes attempt 2", {"host": STOPPED, "attempt": 2}
        if rank.host == STOPPED and (peer.host >= STOPPED or not self.first_meeting):
            yield "leaves the first meeting" if self.first_meeting else "has no first meeting", {"host": MET}
        if rank.host == MET:
            bank = generation % BANKS
            words = tuple(EMPTY if i // OPERATIONS == bank else word for i, word in enumerate(rank.words))
            cleared = {"host": CLEARED, "words": words, "left_over": rank.left_over and bank != 1}
            yield f"clears the words of generation {generation}", cleared
        if rank.host == CLEARED and (peer.host >= CLEARED or not self.second_meeting):
            yield "leaves the second meeting" if self.second_meeting else "has no second meeting", {"host": MET_AGAIN}
        if rank.host == MET_AGAIN and self.one_store:
            changes = {"host": DONE, "generation": generation, "number": 0}
            yield f"publishes generation {generation} with number 0", changes
        elif rank.host == MET_AGAIN:
            yield f"stores generation {generation}", {"host": STORES, "generation": generation}
        elif rank.host == STORES:
            yield "stores number 0", {"host": DONE, "number": 0}

    def wrong(self, state: State) -> str | None:
        for r, rank in enumerate(state):
            if rank.generation == 3 and rank.left_over:
                return f"{RANKS[r]} begins generation 3 with a signal of generation 1 in its words"
            if rank.runs_as != EMPTY:
                met = rank.words[word_of(rank.generation, rank.runs_as)]
                if met not in (EMPTY, rank.replay):
                    return f"{RANKS[r]}'s replay {rank.replay} meets the peer's replay {met}"
        return None

    def ended(self, state: State) -> bool:
        return all(rank.host == DONE and rank.replay == REPLAYS for rank in state)
