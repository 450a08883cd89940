"""P6, P7, P11 and P17 across nodes (docs/two_hops.md).

A and B are on one node, C and D on another; A and C have the same local index, and so have B and D.

Within a node a chunk has arrived as soon as it is sent: its signal is a release after its rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from .explore import Step, with_item

WAITS, SENT, COME, FORWARDED, DONE = range(5)  # a chunk; forwarded: it is in a slot of the node; done: it is placed

# --- dispatch ---------------------------------------------------------------------------------------------------------

RAIL_SLOTS = 2  # of C's row stream at A
ROWS = ((1, 1, 0), (1,))  # for B, in each chunk of C's row stream, and of A's own for its node
ORIGINS = "CA"
CHUNKS = tuple((s, c) for s, rows in enumerate(ROWS) for c in range(len(rows)))
NONE = (-1, -1)


class Chunks(NamedTuple):
    steps: tuple[tuple[int, ...], ...] = ((WAITS,) * len(ROWS[0]), (COME,) * len(ROWS[1]))
    slots: tuple[tuple[tuple[int, int], ...], ...] = ()  # for each origin: the chunk in each of B's slots
    counted: tuple[int, ...] = (0, 0)  # rows for B that A has seen in each row stream
    taken: tuple[int, int] = NONE  # the chunk that A's only warp blocks on
    wrong: str = ""


@dataclass(frozen=True)
class Forwarding:
    """C sends to A, which forwards to B the rows for it, and A's own rows for B. B's output cannot be stored into, so B
    itself places the rows.
    """

    chunk_for_each_chunk: bool = True  # without it a chunk without rows for B is not forwarded
    slots_for_each_origin: bool = True  # without it B has slots per forwarder, whatever the origin
    forwarder_polls: bool = True  # without it A has one warp, which blocks on the first chunk that it finds
    header_says_first: bool = True  # without it A counts the rows that have arrived
    local_slots: int = 1

    def initial(self) -> Chunks:
        return Chunks(slots=((NONE,) * self.local_slots,) * len(ROWS))

    def steps(self, state: Chunks) -> Iterator[Step[Chunks]]:
        for s, c in CHUNKS:
            step, name = state.steps[s][c], f"chunk {c} of {ORIGINS[s]}"
            if step == WAITS and (c < RAIL_SLOTS or state.steps[s][c - RAIL_SLOTS] >= FORWARDED):
                yield f"C sends {name}", self._with(state, s, c, SENT)
            elif step == SENT:
                yield f"{name} arrives at A", self._with(state, s, c, COME)
            elif step == COME:
                yield from self._forwards(state, s, c, name)
            elif step == FORWARDED and (ROWS[s][c] or self.chunk_for_each_chunk):
                lies = self._slots(state, s)[c % self.local_slots]
                there = f"chunk {lies[1]} of {ORIGINS[lies[0]]}"
                wrong = "" if lies == (s, c) else f"B places {there} for {name}"
                after = self._with(state, s, c, DONE)
                yield f"B places {name}, gives the slot back", after._replace(wrong=state.wrong or wrong)

    def _forwards(self, state: Chunks, s: int, c: int, name: str) -> Iterator[Step[Chunks]]:
        if not self.forwarder_polls and state.taken != (s, c):
            if state.taken == NONE:
                yield f"A's warp takes {name}", state._replace(taken=(s, c))
            return
        if c >= self.local_slots and state.steps[s][c - self.local_slots] != DONE:
            return
        after = self._with(state, s, c, FORWARDED)._replace(taken=NONE)
        if not ROWS[s][c] and not self.chunk_for_each_chunk:
            yield f"A finds nothing for B in {name}", after
            return
        first = sum(ROWS[s][:c]) if self.header_says_first else state.counted[s]
        wrong = "" if first == sum(ROWS[s][:c]) else f"row {sum(ROWS[s][:c])} of {ORIGINS[s]} is sent as row {first}"
        slots = with_item(self._slots(state, s), c % self.local_slots, (s, c))
        yield (
            f"A finds its slot at B free, forwards {name}",
            after._replace(
                slots=with_item(state.slots, s if self.slots_for_each_origin else 0, slots),
                counted=with_item(state.counted, s, state.counted[s] + ROWS[s][c]),
                wrong=wrong,
            ),
        )

    def _slots(self, state: Chunks, s: int) -> tuple[tuple[int, int], ...]:
        return state.slots[s if self.slots_for_each_origin else 0]

    def _with(self, state: Chunks, s: int, c: int, step: int) -> Chunks:
        return state._replace(steps=with_item(state.steps, s, with_item(state.steps[s], c, step)))

    def wrong(self, state: Chunks) -> str | None:
        return state.wrong or None

    def ended(self, state: Chunks) -> bool:
        return all(step == DONE for steps in state.steps for step in steps)


# --- combine ----------------------------------------------------------------------------------------------------------


Rows = tuple[tuple[int, ...], ...]  # for each owner: states of the row from its own node and of the one from the other
OWN, OTHER = range(2)
TOKEN = (1, 0)  # for each owner: the token of its own node's row, and that of the other node's
OWNERS, PRODUCERS = "AC", "BD"


@dataclass(frozen=True)
class Returning:
    """B sends rows to A, D to C: one for A's tokens, one for C's. Each has one slot there; A and C forward rows for the
    other, and sum their own tokens. Each one's token 0 has its row in the other's node, token 1 in its own.
    """

    stream_for_each_owner: bool = True  # without it a producer has one row stream per forwarder, own node's rows first
    blocks_take_turns: bool = True  # without it they forward once they have summed

    def initial(self) -> Rows:
        return ((WAITS, WAITS),) * len(OWNERS)

    def steps(self, state: Rows) -> Iterator[Step[Rows]]:
        for owner, steps in enumerate(state):
            for node, step in enumerate(steps):
                here = owner if node == OWN else 1 - owner  # the node of the producer
                name = f"row for {OWNERS[owner]}"
                if step == WAITS and not self._taken(state, here, node):
                    after = self._with(state, owner, node, FORWARDED if node == OWN else COME)
                    yield f"{PRODUCERS[here]} finds a slot free, sends the {name}", after
                elif step == COME and (self.blocks_take_turns or self._summed(state, here)):
                    yield f"{OWNERS[here]} forwards the {name}", self._with(state, owner, node, FORWARDED)
                elif step == FORWARDED and (TOKEN[node] == 0 or steps[1 - node] == DONE):
                    yield f"{OWNERS[owner]} sums token {TOKEN[node]}", self._with(state, owner, node, DONE)

    def _taken(self, state: Rows, here: int, node: int) -> bool:
        """Return whether the producer's only row stream is held up by the previous row."""
        return not self.stream_for_each_owner and node == OTHER and state[here][OWN] != DONE

    def _summed(self, state: Rows, owner: int) -> bool:
        return state[owner] == (DONE, DONE)

    def _with(self, state: Rows, owner: int, node: int, step: int) -> Rows:
        return with_item(state, owner, with_item(state[owner], node, step))

    def wrong(self, state: Rows) -> str | None:
        return None

    def ended(self, state: Rows) -> bool:
        return self._summed(state, 0) and self._summed(state, 1)


CHUNK_ROWS, SLOTS, BLOCKS, TOKENS = 2, 2, 2, 9
MINE = (4, 5)  # tokens whose rows are A's own, the others are B's: B has none in chunk 2


class Slots(NamedTuple):
    sent: int = 0  # chunks
    given_back: tuple[int, ...] = (0,) * SLOTS  # the values of the words `next`
    holds: tuple[int, ...] = (-1,) * SLOTS  # the chunk in each slot
    opened: int = 0  # bit set of windows
    summed: int = 0  # bit set of tokens
    wrong: str = ""


@dataclass(frozen=True)
class Summing:
    """B sends rows for A's tokens, a chunk for each chunk of A's row stream, in two slots. Each block of A sums every
    second window of tokens, once the window's chunks have come, in any order of its tokens.
    """

    windows_in_order: bool = True  # without it from the last one
    no_wider_than_slots: bool = True  # without it the rows of a window are in more chunks than there are slots
    last_row_gives_back: bool = True  # without it the first
    counts_all_rows: bool = True  # without it only the producer's, of which a chunk may have none
    waits_for_all_chunks: bool = True  # without it only for those that hold a row of the producer

    def initial(self) -> Slots:
        return Slots()

    def steps(self, state: Slots) -> Iterator[Step[Slots]]:
        slot = state.sent % SLOTS
        if state.sent * CHUNK_ROWS < TOKENS and state.given_back[slot] >= state.sent // SLOTS:
            holds = with_item(state.holds, slot, state.sent)
            yield f"B finds a slot free, sends chunk {state.sent}", state._replace(sent=state.sent + 1, holds=holds)
        windows = [range(t, min(t + self._width(), TOKENS)) for t in range(0, TOKENS, self._width())]
        for block in range(BLOCKS):
            mine = [w for w in range(block, len(windows), BLOCKS) if self._left(state, windows[w])]
            if mine:
                w = mine[0 if self.windows_in_order else -1]
                yield from self._takes(state, w, windows[w])

    def _width(self) -> int:
        return (SLOTS - 1 if self.no_wider_than_slots else SLOTS) * CHUNK_ROWS + 1

    def _left(self, state: Slots, window: range) -> list[int]:
        return [t for t in window if not state.summed >> t & 1]

    def _takes(self, state: Slots, w: int, window: range) -> Iterator[Step[Slots]]:
        if state.opened >> w & 1:
            for token in self._left(state, window):
                yield self._sums(state, token)
        elif all(t // CHUNK_ROWS < state.sent for t in window if t not in MINE or self.waits_for_all_chunks):
            yield f"A finds all chunks of window {w}", state._replace(opened=state.opened | 1 << w)

    def _sums(self, state: Slots, token: int) -> Step[Slots]:
        chunk = token // CHUNK_ROWS
        slot = chunk % SLOTS
        lies = state.holds[slot]
        wrong = f"A takes chunk {lies} for chunk {chunk}" if token not in MINE and lies != chunk else ""
        after = state._replace(summed=state.summed | 1 << token, wrong=wrong)
        rows = range(chunk * CHUNK_ROWS, min((chunk + 1) * CHUNK_ROWS, TOKENS))
        counted = [t for t in rows if self.counts_all_rows or t not in MINE]
        summed = sum(after.summed >> t & 1 for t in counted)
        gives = token in counted and summed == (len(counted) if self.last_row_gives_back else 1)
        if gives:
            after = after._replace(given_back=with_item(after.given_back, slot, after.given_back[slot] + 1))
        return f"A sums token {token}" + ", gives the slot back" * gives, after

    def wrong(self, state: Slots) -> str | None:
        return state.wrong or None

    def ended(self, state: Slots) -> bool:
        return state.summed == (1 << TOKENS) - 1


# --- counts -----------------------------------------------------------------------------------------------------------

NAMES = "ABCD"
ALL = range(len(NAMES))
A, B, C, D = ALL
NODES = ((A, B), (C, D))
UNSET = -1
MASKS = (0, 1 << B, 1 << D)  # ranks that may be left out


class Rank(NamedTuple):
    mask: int = UNSET  # bit set of ranks that it leaves out
    counted: bool = False  # its messages to forwarders are sent
    told: bool = False  # its messages to the ranks of its node are sent
    complete: bool = False
    failed: bool = False


Ranks = tuple[Rank, ...]


@dataclass(frozen=True)
class Counts:
    """A rank sends its counts to its forwarder in the other node, and a forwarder notifies the ranks of its node. The
    other rank of a node replaces a forwarder that is left out.
    """

    forwarder_waits: bool = True  # without it a forwarder notifies its node of the counts that have arrived by then
    both_messages_carry_the_mask: bool = True  # without it only the first one does

    def initial(self) -> Ranks:
        return (Rank(),) * len(NAMES)

    def steps(self, state: Ranks) -> Iterator[Step[Ranks]]:
        unset = next((r for r in ALL if state[r].mask == UNSET), None)
        if unset is not None:
            for mask in MASKS:
                if not mask >> unset & 1:
                    text = f"{NAMES[unset]} leaves out {_names(mask)}"
                    yield text, self._with(state, unset, mask=mask)
            return
        for r, rank in enumerate(state):
            if not rank.failed and not rank.complete:
                yield from self._goes_on(r, rank, state)

    def _goes_on(self, r: int, rank: Rank, state: Ranks) -> Iterator[Step[Ranks]]:
        name = NAMES[r]
        if not rank.counted:
            yield f"{name} sends its counts", self._with(state, r, counted=True)
            return
        streams = [s for s in ALL if s // 2 != r // 2 and self._forwarder(s, rank.mask) == r]
        come = [s for s in streams if state[s].counted and self._forwarder(s, state[s].mask) == r]
        mates = [f for f in NODES[r // 2] if not rank.mask >> f & 1]
        told = [f for f in mates if state[f].told and not state[f].mask >> r & 1]
        unlike = [s for s in come if state[s].mask != rank.mask]
        if self.both_messages_carry_the_mask:
            unlike += [f for f in told if state[f].mask != rank.mask]
        if unlike:
            yield f"{name} finds another mask in {NAMES[unlike[0]]}'s message, fails", self._with(state, r, failed=True)
        elif not rank.told and (come == streams or not self.forwarder_waits):
            yield f"{name} notifies its node", self._with(state, r, told=True)
        elif rank.told and told == mates:
            yield f"{name} has all counts", self._with(state, r, complete=True)
        elif not self._can_go_on(r, streams, mates, state):
            yield f"{name} times out, fails", self._with(state, r, failed=True)

    def _forwarder(self, s: int, mask: int) -> int | None:
        """Return the forwarder of a rank in the other node, according to a mask."""
        if mask >> s & 1:
            return None
        usual = (s + 2) % len(NAMES)
        return usual ^ 1 if mask >> usual & 1 else usual

    def _can_go_on(self, r: int, streams: list[int], mates: list[int], state: Ranks) -> bool:
        sends = all(not state[s].failed and self._forwarder(s, state[s].mask) == r for s in streams)
        return sends and all(not state[f].failed and not state[f].mask >> r & 1 for f in mates)

    def _with(self, state: Ranks, r: int, **changes: Any) -> Ranks:
        return with_item(state, r, state[r]._replace(**changes))

    def wrong(self, state: Ranks) -> str | None:
        for r, rank in enumerate(state):
            for q in ALL:
                if rank.complete and not rank.mask >> q & 1 and state[q].mask != rank.mask:
                    masks = _names(rank.mask), _names(state[q].mask)
                    return f"{NAMES[r]} has all counts, and leaves out {masks[0]}, but {NAMES[q]} {masks[1]}"
            agree = all(rank.mask >> q & 1 or state[q].mask == rank.mask for q in ALL)
            if rank.failed and agree:
                return "all leave out the same, and yet one fails"
        return None

    def ended(self, state: Ranks) -> bool:
        return all(rank.complete or rank.failed for rank in state)


def _names(mask: int) -> str:
    return " and ".join(NAMES[r] for r in ALL if mask >> r & 1) or "no rank"
