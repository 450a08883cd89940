"""P9 and P10: where rows for an output may be stored, and by when a rank must have mapped the memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from .explore import Step, with_item

NONE = -1
ROUNDS = 2  # an offer is a place, 0 or 1, or this
CALLS = 2


class Call(NamedTuple):
    number: int = 0
    rows: int = NONE  # from B to A; with them the counts are known
    output: int = NONE  # the place of A's, or ROUNDS
    told: bool = False  # A has offered it to B
    sent: str = ""  # sent by B: data or a chunk
    latest: int = NONE  # the last place that B has learned of
    wrong: str = ""


@dataclass(frozen=True)
class Offers:
    """B sends to A, with or without rows. A's output of each call is at a place of its own, or takes rounds; once the
    call has ended, its user passes the output on, and the memory becomes another tensor's.
    """

    waits_for_offer: bool = True  # without it B stores to the place of the last call's output
    offers_without_rows: bool = True  # without it A notifies B only if B has rows for it

    def initial(self) -> Call:
        return Call()

    def steps(self, state: Call) -> Iterator[Step[Call]]:
        name = f"in call {state.number}"
        if state.number == CALLS:
            return
        if state.rows == NONE:
            for rows in (1, 0):
                yield f"B has {'rows' if rows else 'no rows'} for A {name}: counts", state._replace(rows=rows)
            return
        if state.output == NONE:
            told = bool(state.rows) or self.offers_without_rows
            for output, what in ((state.number, f"is at place {state.number}"), (ROUNDS, "takes rounds")):
                text = f"A's output {name} {what}: {'offers' if told else 'notifies no rank'}"
                yield text, state._replace(output=output, told=told)
        if not state.sent:
            if state.told:
                yield from self._sends(state, state.output)
            elif not state.rows and not self.offers_without_rows:
                yield from self._sends(state, state.number)  # nothing is stored: it signals as for an offer
            if state.latest not in (NONE, ROUNDS) and not self.waits_for_offer:
                yield from self._sends(state, state.latest)
        # A waits for the signal that matches its output.
        if state.sent == ("chunk" if state.output == ROUNDS else "data") and state.output != NONE:
            yield f"A ends call {state.number}", Call(state.number + 1, latest=state.latest)

    def _sends(self, state: Call, place: int) -> Iterator[Step[Call]]:
        if place == ROUNDS:
            yield f"B sends a chunk in call {state.number}", state._replace(sent="chunk", latest=ROUNDS)
            return
        misses = bool(state.rows) and place != state.output
        yield (
            f"B {f'stores rows at place {place}' if state.rows else 'has no rows'} and signals data",
            state._replace(sent="data", latest=place, wrong=f"place {place} is not an output of this call" * misses),
        )

    def wrong(self, state: Call) -> str | None:
        return state.wrong or None

    def ended(self, state: Call) -> bool:
        return state.number == CALLS


OPERATIONS, REGIONS = 3, 2
OLD, NEW = 1, 2  # A's offer: rounds in its old memory, or its output in the new piece


class Arena(NamedTuple):
    begun: tuple[int, ...] = (0, 0)  # operations of A and of B whose counts have been sent
    finished: tuple[int, ...] = (0, 0)
    added: bool = False
    announced: int = NONE  # the operation whose counts announced it
    offers: tuple[int, ...] = (0,) * OPERATIONS
    known: bool = False  # B has the descriptor
    mapped: bool = False
    launched: bool = False  # B's kernel of its next operation to finish runs, and waits for the offer
    wrong: str = ""


@dataclass(frozen=True)
class Growth:
    """A's outputs need more memory than it has. A and B begin up to two operations before they finish the first."""

    takes_rounds_meanwhile: bool = True  # without it A offers memory in the operation for which it has added it
    maps_before_launch: bool = True  # without it B maps while its kernel runs, and A's offer waits until it has
    offers_behind_its_counts: bool = True  # without it A offers the memory once it has sent the counts that announce it

    def initial(self) -> Arena:
        return Arena()

    def steps(self, state: Arena) -> Iterator[Step[Arena]]:
        for r, name in enumerate("AB"):
            n = state.begun[r]
            if n < OPERATIONS and n - REGIONS < state.finished[r]:
                begun, announces = with_item(state.begun, r, n + 1), r == 0 and state.added and state.announced == NONE
                text = f"{name} begins {n}: counts{', which announce the new memory' * announces}"
                yield text, state._replace(begun=begun, announced=n if announces else state.announced)
        yield from self._owner(state)
        yield from self._peer(state)

    def _owner(self, state: Arena) -> Iterator[Step[Arena]]:
        n = state.finished[0]
        if n == OPERATIONS or min(state.begun) <= n:
            return
        may_offer = state.announced != NONE and (state.announced <= n or not self.offers_behind_its_counts)
        grown = state._replace(added=True, finished=with_item(state.finished, 0, n + 1))
        if may_offer:
            if state.mapped or self.maps_before_launch:
                yield f"A finishes {n}: offers its output in the new memory", self._offer(grown, n, NEW)
        elif self.takes_rounds_meanwhile:
            text = f"A finishes {n}: takes rounds{', and adds memory' * (not state.added)}"
            yield text, self._offer(grown, n, OLD)
        else:
            yield f"A finishes {n}: adds memory and offers its output there", self._offer(grown, n, NEW)

    def _offer(self, state: Arena, n: int, what: int) -> Arena:
        return state._replace(offers=with_item(state.offers, n, what))

    def _peer(self, state: Arena) -> Iterator[Step[Arena]]:
        n = state.finished[1]
        if n == OPERATIONS or min(state.begun) <= n:
            return
        if not state.launched:
            known = state.known or NONE < state.announced <= n
            mapped = state.mapped or (known and self.maps_before_launch)
            text = f"B has A's counts of {n}{', maps' * (mapped and not state.mapped)}, and launches its kernel"
            yield text, state._replace(known=known, mapped=mapped, launched=True)
        elif state.offers[n]:
            done = state._replace(launched=False, finished=with_item(state.finished, 1, n + 1))
            lost = state.offers[n] == NEW and not state.mapped
            wrong = f"B's kernel of {n} stores to addresses that are not mapped" * lost
            yield f"B's kernel of {n} has A's offer, stores rows", done._replace(wrong=wrong)
        # The driver delays mapping until no kernel of this rank runs.
        if state.known and not state.mapped and not state.launched:
            yield "B maps the new memory", state._replace(mapped=True)

    def wrong(self, state: Arena) -> str | None:
        return state.wrong or None

    def ended(self, state: Arena) -> bool:
        return min(state.finished) == OPERATIONS
