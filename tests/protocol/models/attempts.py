"""P16: ranks that give up a recovery, or are interrupted in it, and try again.

Attempt n to recover begins generation n + 1. A rank tells the others how far it is: (n, 1) once it has come to the
first meeting of attempt n, (n, 2) once to the second. At first A has already made an attempt that B was too late for.
The program calls `recover` on all ranks, and again on all ranks until it has returned on all of them; or each rank
calls it again by itself when it has raised, or when the next call has.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from .explore import RANKS, Step, with_item

RAISED, FIRST, MET, SECOND, MET_AGAIN, DONE = range(6)  # where a host is
RECOVERS = (FIRST, MET, SECOND, MET_AGAIN)


class Rank(NamedTuple):
    host: int = RAISED
    calls: int = 0  # of `recover`
    attempt: int = 0
    told: tuple[int, int] = (0, 0)
    generation: int = 1
    ended: int = 1  # the newest generation that an abort word has ended
    interrupts: int = 1  # still to come


State = tuple[Rank, ...]


@dataclass(frozen=True)
class Attempts:
    """What a rank does about attempts that have failed."""

    joins_later_attempt: bool = True
    ends_what_others_may_have_begun: bool = True
    ranks: int = 2
    each_by_itself: bool = False

    def initial(self) -> State:
        return (Rank(attempt=1, told=(1, 1)), *[Rank()] * (self.ranks - 1))

    def steps(self, state: State) -> Iterator[Step[State]]:
        for r, rank in enumerate(state):
            name, others = RANKS[r], [other for o, other in enumerate(state) if o != r]
            for text, changes in self._steps_of(rank, others):
                after = with_item(state, r, rank._replace(**changes))
                # It leaves behind an attempt that others may have completed.
                leaves = rank.host in (SECOND, MET_AGAIN) and changes["host"] not in (MET_AGAIN, DONE)
                if leaves and self.ends_what_others_may_have_begun:
                    after = tuple(one._replace(ended=max(one.ended, rank.attempt + 1)) for one in after)
                yield f"{name} {text}", after

    def _steps_of(self, rank: Rank, others: list[Rank]) -> Iterator[tuple[str, dict[str, Any]]]:
        attempt = rank.attempt
        if self.each_by_itself:
            calls, again = 0, rank.host == RAISED or (rank.host == DONE and rank.ended >= rank.generation)
        else:
            calls, again = rank.calls + 1, any(one.host == RAISED or one.calls > rank.calls for one in (rank, *others))
            again &= all((other.calls, other.host not in RECOVERS) >= (rank.calls, True) for other in others)
        if rank.host not in RECOVERS and again:
            begun = {"host": FIRST, "calls": calls, "attempt": attempt + 1, "told": (attempt + 1, 1)}
            yield f"makes attempt {attempt + 1}", begun
        in_vain = not self.each_by_itself and any((o.calls, o.host) == (rank.calls, RAISED) for o in others)
        later = max(other.told[0] for other in others)
        if rank.host in (FIRST, SECOND) and later > attempt:
            if self.joins_later_attempt:
                yield f"joins attempt {later}", {"host": FIRST, "attempt": later, "told": (later, 1)}
            else:
                yield "raises: another has begun a later attempt", {"host": RAISED}
        elif rank.host == FIRST and all(other.told >= (attempt, 1) for other in others):
            yield "leaves the first meeting", {"host": MET}
        elif rank.host == SECOND and all(other.told == (attempt, 2) for other in others):
            yield "leaves the second meeting", {"host": MET_AGAIN}
        elif rank.host in (FIRST, SECOND) and in_vain:
            yield "times out", {"host": RAISED}
        if rank.host == MET:
            yield "clears its words", {"host": SECOND, "told": (attempt, 2)}
        if rank.host == MET_AGAIN:
            yield f"begins generation {attempt + 1}", {"host": DONE, "generation": attempt + 1}
        if rank.host in RECOVERS and rank.interrupts:
            yield "is interrupted", {"host": RAISED, "interrupts": rank.interrupts - 1}

    def wrong(self, state: State) -> str | None:
        if self.each_by_itself:
            return None
        returned = all(rank.host == DONE and rank.calls == state[0].calls for rank in state)
        if returned and len({rank.generation for rank in state}) > 1:
            return "recover returns on all ranks, in different generations"
        if returned and any(rank.generation <= rank.ended for rank in state):
            return "recover returns on all ranks, and the next call raises"
        interrupted = self.ranks - sum(rank.interrupts for rank in state)
        if state[0].calls > interrupted + 1:
            return "recover raises although no rank was interrupted"
        return None

    def ended(self, state: State) -> bool:
        generation = state[0].generation
        return all(rank.host == DONE and rank.generation == generation > rank.ended for rank in state)
