"""P5 to P8: what a signal says about rows, given how little is promised about the order in which puts arrive."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from .explore import RANKS, Step, with_item

UNIT = 2  # added by a put
PUTS, USES = 2, 2  # puts in a use, each to a place of its own, and successive uses of these places
NONE = -1
ON_ITS_WAY, LANDED, ADDED = range(3)  # a piece: its data, then its share of the unit


class Slot(NamedTuple):
    posted: int = 0  # uses that the writer has begun
    pieces: tuple[tuple[int, int, int, int], ...] = ()  # use, put, piece, state: those not completely arrived
    holds: tuple[tuple[int, ...], ...] = ()  # for each put and piece, the use of the data stored there
    word: int = 0
    base: int = 0
    use: int = 0  # the reader's
    placed: int = 0  # puts of this use
    given_back: int = 0  # uses
    wrong: str = ""


@dataclass(frozen=True)
class Puts:
    """A writer puts rows to places at a reader, twice, under one word."""

    waits_for_all_of_a_use: bool = True  # P5; without it a word that says two puts counts for the first two
    one_use_at_a_time: bool = True  # P6
    base_moves_by_expected: bool = True  # P7; without it to the value of the word when the use ends
    pieces_add_one_unit: bool = True  # P8; without it each adds one
    signal_behind_its_data: bool = True  # P8; without it the two use different queue pairs
    pieces: int = 2  # of each put in flight

    def initial(self) -> Slot:
        return Slot(holds=((NONE,) * self.pieces,) * PUTS)

    def steps(self, state: Slot) -> Iterator[Step[Slot]]:
        use = state.posted
        if use < USES and (state.given_back == use or not self.one_use_at_a_time):
            added = tuple((use, put, piece, ON_ITS_WAY) for put in range(PUTS) for piece in range(self.pieces))
            pieces = tuple(sorted((*state.pieces, *added)))
            yield f"A posts the puts of use {use}", state._replace(posted=use + 1, pieces=pieces)
        yield from self._network(state)
        yield from self._reader(state)

    def _network(self, state: Slot) -> Iterator[Step[Slot]]:
        share = UNIT // self.pieces if self.pieces_add_one_unit else UNIT
        for one in state.pieces:
            use, put, piece, how_far = one
            rest = tuple(other for other in state.pieces if other != one)
            name = f"piece {piece} of put {put} of use {use}"
            if how_far != LANDED:
                holds = with_item(state.holds, put, with_item(state.holds[put], piece, use))
                left = rest if how_far == ADDED else tuple(sorted((*rest, (use, put, piece, LANDED))))
                yield f"the data of {name} lands", state._replace(pieces=left, holds=holds)
            if how_far == LANDED:
                yield f"{name} adds to the word", state._replace(pieces=rest, word=state.word + share)
            elif how_far == ON_ITS_WAY and not self.signal_behind_its_data:
                left = tuple(sorted((*rest, (use, put, piece, ADDED))))
                yield f"{name} adds to the word", state._replace(pieces=left, word=state.word + share)

    def _reader(self, state: Slot) -> Iterator[Step[Slot]]:
        if state.use == USES:
            return
        expected = PUTS * UNIT
        if state.placed < PUTS:
            wanted = expected if self.waits_for_all_of_a_use else (state.placed + 1) * UNIT
            if state.word >= state.base + wanted:
                found = [use for use in state.holds[state.placed] if use != state.use]
                what = "stale data" if NONE in found or any(u < state.use for u in found) else "the next use's"
                wrong = f"B places {what} for put {state.placed} of use {state.use}" if found else ""
                yield (
                    f"B places put {state.placed} of use {state.use}",
                    state._replace(placed=state.placed + 1, wrong=wrong),
                )
        elif state.given_back == state.use:
            yield f"B gives use {state.use} back", state._replace(given_back=state.use + 1)
        else:
            base = state.base + expected if self.base_moves_by_expected else state.word
            yield (
                f"B ends use {state.use}: its base moves from {state.base} to {base}",
                state._replace(base=base, use=state.use + 1, placed=0),
            )

    def wrong(self, state: Slot) -> str | None:
        return state.wrong or None

    def ended(self, state: Slot) -> bool:
        return state.use == USES


class Source(NamedTuple):
    step: int = 0  # 0: nothing done, 1: has rows or not, 2: its NIC adds, 3: done
    rows: int = 0
    loaded: int = 0  # the value of the word that its NIC has loaded


class Words(NamedTuple):
    sources: tuple[Source, ...] = (Source(), Source())
    values: tuple[int, ...] = (0, 0)
    ended: bool = False


@dataclass(frozen=True)
class Writers:
    """A and B, with or without rows for C, signal to C by NICs, whose adds are not atomic with respect to each
    other."""

    one_writer: bool = True  # P6; without it A and B add to the same word
    sends_without_rows: bool = True  # P7; without it a source without rows sends no header, and no signal

    def initial(self) -> Words:
        return Words()

    def steps(self, state: Words) -> Iterator[Step[Words]]:
        for r, source in enumerate(state.sources):
            word = r if self.one_writer else 0
            if source.step == 0:
                for rows in (0, 1):
                    after = source._replace(step=1 if rows or self.sends_without_rows else 3, rows=rows)
                    text = f"{RANKS[r]} has {'rows' if rows else 'no rows'} for C"
                    yield text, state._replace(sources=with_item(state.sources, r, after))
            elif source.step == 1:
                after = source._replace(step=2, loaded=state.values[word])
                yield f"{RANKS[r]}'s NIC loads the word", state._replace(sources=with_item(state.sources, r, after))
            elif source.step == 2:
                yield (
                    f"{RANKS[r]}'s NIC stores the sum",
                    Words(
                        with_item(state.sources, r, source._replace(step=3)),
                        with_item(state.values, word, source.loaded + UNIT),
                    ),
                )
        if not state.ended and sum(state.values) == 2 * UNIT:
            yield "C has received from both", state._replace(ended=True)

    def wrong(self, state: Words) -> str | None:
        return None

    def ended(self, state: Words) -> bool:
        return state.ended
