"""P12 and P15: a rank fails while another loads rows that it has published, and the user's kernels still run.

In Failures every rank runs one combine, followed by a user kernel that overwrites the rows published here whatever the
outcome of the combine. B loads rows that A has published. The contents of C's messages do not matter, but every rank
waits for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from .explore import RANKS, Step, with_item

A, B, C = range(3)
ROWS = 2
START, RUNS, LOOKS, TELLS, ANSWERS, USER, OVER = range(7)  # the state of a rank
CLEAR, NOW, OLDER = range(3)  # an abort word: no failure, one of this generation, one of an older generation
OTHERS = {A: (B, C), B: (A, C), C: (A, B)}  # in the order in which a rank notifies them


class Rank(NamedTuple):
    step: int = START
    sent: int = 0  # number of ranks to which it has sent the abort word, itself first
    word: int = CLEAR


class State(NamedTuple):
    ranks: tuple[Rank, ...] = (Rank(),) * 3
    wire: tuple[tuple[int, int], ...] = ()  # abort words in flight: (to, from)
    stale: bool = False  # one of an older generation is in flight to B
    started: int = 0  # bit set of ranks whose operation has begun; A has published its rows then
    failures: int = 0  # of ranks that had not been notified of one
    loaded: int = 0
    new: bool = False  # some row was no longer A's when B loaded it
    wrong: str = ""

    def with_rank(self, r: int, **changes: Any) -> State:
        return self._replace(ranks=with_item(self.ranks, r, self.ranks[r]._replace(**changes)))


@dataclass(frozen=True)
class Failures:
    """P12: the first two rules; P15: the others."""

    read_is_awaited: bool = True  # without it A's operation may end before B has loaded its rows
    last_look: bool = True
    tells_every_rank: bool = True  # without it a rank that fails stores the abort word only into its own heap
    told_or_not: bool = True  # without it a rank that was notified of a failure notifies no other
    answers_first: bool = True  # without it a kernel ends while its abort words are in flight
    word_of_its_generation: bool = True  # without it all generations have the same abort word
    failures: int = 1  # ranks that may fail by themselves; all others that wait for them must be notified

    def initial(self) -> State:
        # With a word for each generation it lands where no rank checks any more.
        return State(stale=not self.word_of_its_generation)

    def steps(self, state: State) -> Iterator[Step[State]]:
        for r, rank in enumerate(state.ranks):
            yield from self._kernel(r, rank, state)
        for to, source in state.wire:
            after = state.with_rank(to, word=NOW)._replace(wire=tuple(one for one in state.wire if one != (to, source)))
            yield f"{RANKS[source]}'s abort word lands at {RANKS[to]}", after
        if state.stale:
            after = state._replace(stale=False).with_rank(B, word=OLDER)
            yield "a late abort word of an older generation lands at B", after

    def _kernel(self, r: int, rank: Rank, state: State) -> Iterator[Step[State]]:
        name = RANKS[r]
        if rank.step == START and rank.word != NOW:
            text = {A: "A starts, and publishes its rows", B: "B starts", C: "C starts, and sends"}[r]
            yield text, state.with_rank(r, step=RUNS)._replace(started=state.started | 1 << r)
        if rank.step in (START, RUNS, LOOKS) and rank.word == NOW and (rank.step != LOOKS or self.last_look):
            yield f"{name} finds the abort word", state.with_rank(r, step=TELLS if self.told_or_not else ANSWERS)
        if rank.step == RUNS:
            if state.failures < self.failures:
                yield f"{name} fails", state.with_rank(r, step=TELLS)._replace(failures=state.failures + 1)
            if r == B and state.loaded < ROWS and state.started & 1 << A:
                new = state.ranks[A].step == OVER
                text = f"B loads row {state.loaded} of A{', already overwritten' * new}"
                yield text, state._replace(loaded=state.loaded + 1, new=state.new or new)
            if self._has_all(r, state):
                yield f"{name} has everything that it waits for", state.with_rank(r, step=LOOKS)
        elif rank.step == LOOKS and (rank.word != NOW or not self.last_look):
            after = state.with_rank(r, step=USER)
            wrong = "B's operation succeeds, with rows that are not A's" if r == B and state.new else ""
            yield f"{name} succeeds", after._replace(wrong=wrong)
        elif rank.step == TELLS:
            yield self._tells(r, rank, state)
        elif rank.step == ANSWERS and not (self.answers_first and any(source == r for _, source in state.wire)):
            yield f"{name}'s kernel ends, failed", state.with_rank(r, step=USER)
        elif rank.step == USER:
            yield f"{name}'s user overwrites what {name} has published", state.with_rank(r, step=OVER)

    def _has_all(self, r: int, state: State) -> bool:
        read = state.loaded == ROWS or (r == A and not self.read_is_awaited)
        return read and state.started == 1 << A | 1 << B | 1 << C

    def _tells(self, r: int, rank: Rank, state: State) -> Step[State]:
        if rank.sent == 0:
            alone = not self.tells_every_rank
            after = state.with_rank(r, word=NOW, sent=1, step=ANSWERS if alone else TELLS)
            return f"{RANKS[r]} stores the abort word in its own heap", after
        to = OTHERS[r][rank.sent - 1]
        after = state.with_rank(r, sent=rank.sent + 1, step=ANSWERS if rank.sent == len(OTHERS[r]) else TELLS)
        return f"{RANKS[r]} sends the abort word to {RANKS[to]}", after._replace(
            wire=tuple(sorted((*state.wire, (to, r))))
        )

    def wrong(self, state: State) -> str | None:
        return state.wrong or None

    def ended(self, state: State) -> bool:
        return all(rank.step == OVER for rank in state.ranks)


class Passed(NamedTuple):
    step: tuple[int, ...] = (RUNS, RUNS, RUNS)  # of the forwarder, the producer and the owner
    words: tuple[int, ...] = (CLEAR, CLEAR, CLEAR)
    told: int = 0  # notified by the producer: itself, the forwarder, and finally the owner
    loaded: int = 0
    new: bool = False  # some row was no longer the producer's when the forwarder loaded it
    sent: bool = False
    wrong: str = ""


@dataclass(frozen=True)
class Passing:
    """P12 in two hops: A sums rows that B publishes in A's node, and sends the sums to C in another node. B fails, and
    its user's kernel overwrites the rows when B's kernel has ended. C waits only for A's chunk.
    """

    looks_before_it_sends: bool = True
    answers_first: bool = True  # without it B's kernel ends while its abort word is in flight to A

    def initial(self) -> Passed:
        return Passed()

    def steps(self, state: Passed) -> Iterator[Step[Passed]]:
        yield from self._forwarder(state)
        yield from self._producer(state)
        yield from self._owner(state)

    def _forwarder(self, state: Passed) -> Iterator[Step[Passed]]:
        if state.step[A] == OVER:
            return
        if state.words[A] == NOW and not (state.step[A] == LOOKS and not self.looks_before_it_sends):
            yield "A finds the abort word, and fails", state._replace(step=with_item(state.step, A, OVER))
        if state.step[A] == RUNS and state.loaded < ROWS:
            new = state.step[B] == OVER
            text = f"A loads row {state.loaded} of B{', already overwritten' * new}"
            after = state._replace(loaded=state.loaded + 1, new=state.new or new)
            yield text, after._replace(step=with_item(state.step, A, LOOKS)) if after.loaded == ROWS else after
        if state.step[A] == LOOKS and (state.words[A] == CLEAR or not self.looks_before_it_sends):
            yield "A sends the sums to C", state._replace(step=with_item(state.step, A, OVER), sent=True)

    def _producer(self, state: Passed) -> Iterator[Step[Passed]]:
        if state.step[B] == RUNS:
            yield "B fails", state._replace(step=with_item(state.step, B, TELLS))
        elif state.step[B] == TELLS:
            if state.told == 0:
                yield "B sends the abort word to A", state._replace(told=1)
            if state.told >= 2 or (state.told == 1 and not self.answers_first):
                after = state._replace(step=with_item(state.step, B, OVER))
                yield "B's kernel ends, and B's user overwrites what B has published", after
        if state.told == 1:
            yield "B's abort word lands at A", state._replace(words=with_item(state.words, A, NOW), told=2)
        if state.told == 2:
            yield "B's host thread notifies C", state._replace(words=with_item(state.words, C, NOW), told=3)

    def _owner(self, state: Passed) -> Iterator[Step[Passed]]:
        if state.step[C] != RUNS:
            return
        if state.words[C] == NOW:
            yield "C finds the abort word, and fails", state._replace(step=with_item(state.step, C, OVER))
        elif state.sent:
            wrong = "C's operation succeeds, with rows that are not B's" if state.new else ""
            yield "C succeeds", state._replace(step=with_item(state.step, C, OVER), wrong=wrong)

    def wrong(self, state: Passed) -> str | None:
        return state.wrong or None

    def ended(self, state: Passed) -> bool:
        return state.step == (OVER,) * 3


class Lent(NamedTuple):
    kernel: int = RUNS  # of A
    host: int = RUNS  # of A
    receiver: int = RUNS  # C
    word: int = CLEAR  # A's own abort word
    told: bool = False  # C
    loaded: int = 0
    new: bool = False  # some row was no longer the caller's when A's kernel loaded it
    sent: bool = False
    wrong: str = ""


@dataclass(frozen=True)
class Lending:
    """P12: A's kernel loads rows of A's caller, and sends them to C, which it does not reach by loads and stores. A's
    host gives up meanwhile, and then the caller overwrites the rows. C waits for nothing else.
    """

    looks_behind_its_loads: bool = True
    kernel_is_told_first: bool = True  # without it the caller goes on before A's own abort word is stored

    def initial(self) -> Lent:
        return Lent()

    def steps(self, state: Lent) -> Iterator[Step[Lent]]:
        yield from self._kernel(state)
        yield from self._host(state)
        if state.receiver == RUNS and state.told:
            yield "C finds the abort word, and fails", state._replace(receiver=OVER)
        elif state.receiver == RUNS and state.sent:
            wrong = "C's operation succeeds, with rows that are not A's" if state.new else ""
            yield "C succeeds", state._replace(receiver=OVER, wrong=wrong)

    def _kernel(self, state: Lent) -> Iterator[Step[Lent]]:
        if state.kernel == OVER:
            return
        if state.word == NOW and (state.kernel == RUNS or self.looks_behind_its_loads):
            yield "A's kernel finds the abort word, and fails", state._replace(kernel=OVER)
        if state.kernel == RUNS:
            new = state.host >= USER
            after = state._replace(loaded=state.loaded + 1, new=state.new or new)
            text = f"A's kernel loads row {state.loaded}{', already overwritten' * new}"
            yield text, after._replace(kernel=LOOKS) if after.loaded == ROWS else after
        elif state.word == CLEAR or not self.looks_behind_its_loads:
            yield "A's kernel sends the rows to C", state._replace(kernel=OVER, sent=True)

    def _host(self, state: Lent) -> Iterator[Step[Lent]]:
        if state.host == RUNS:
            yield "A's host gives up", state._replace(host=TELLS)
        elif state.host == TELLS:
            if state.word == CLEAR:
                yield "A's host stores A's abort word", state._replace(word=NOW)
            if state.word == NOW or not self.kernel_is_told_first:
                yield "A's caller overwrites its rows", state._replace(host=USER)
        elif state.host == USER:
            yield "A's host notifies C", state._replace(host=OVER, word=NOW, told=True)

    def wrong(self, state: Lent) -> str | None:
        return state.wrong or None

    def ended(self, state: Lent) -> bool:
        return (state.kernel, state.host, state.receiver) == (OVER,) * 3
