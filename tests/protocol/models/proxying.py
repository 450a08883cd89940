"""P18: commands in a ring that a host takes out, and the messages that it turns them into."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from .explore import Step, with_item

# --- the ring ---------------------------------------------------------------------------------------------------------

Half = tuple[int, str]  # its lap, and the command that it belongs to
EMPTY: Half = (0, "")
LOW, HIGH = 0, 1
BEGINS, WAITS, FILLS, GONE = range(4)


class Thread(NamedTuple):
    put: int = 0  # number of its puts that it has posted
    step: int = BEGINS
    begin: int = -1  # the first slot of the put in progress
    stored: tuple[tuple[int, int], ...] = ()  # halves still to be stored: command of the put, which half


class Ring(NamedTuple):
    slots: tuple[tuple[Half, Half], ...]
    threads: tuple[Thread, ...]
    reserved: int = 0
    taken: int = 0
    done: tuple[str, ...] = ()  # commands that the host has taken
    wrong: str = ""


@dataclass(frozen=True)
class Commands:
    """Two threads of a kernel post puts of one and of two commands to a ring of two slots. A thread's stores of a
    command's halves may become visible in either order. A thread that finds no room may give up.
    """

    laps_in_both_halves: bool = True  # without it only the upper half has one
    lap_of_each_position: bool = True  # without it all commands of a put have the first one's lap
    taken_when_free: bool = True  # without it slots are handed out first, and then waited for
    room_for_all: bool = True  # without it a put takes its slots when the first of them is free
    gives_up: int = 1  # whether threads may
    commands: int = 2  # of the ring
    puts: tuple[tuple[int, ...], ...] = ((1, 2), (2, 1))  # commands of each put, by thread

    def initial(self) -> Ring:
        return Ring(((EMPTY, EMPTY),) * self.commands, (Thread(),) * len(self.puts))

    def _lap(self, position: int) -> int:
        return (position // self.commands + 1) & 1

    def steps(self, state: Ring) -> Iterator[Step[Ring]]:
        for t, thread in enumerate(state.threads):
            yield from self._thread(state, t, thread)
        yield from self._host(state)

    def _thread(self, state: Ring, t: int, thread: Thread) -> Iterator[Step[Ring]]:
        name = f"thread {t}"
        if thread.step == BEGINS and thread.put < len(self.puts[t]):
            count = self.puts[t][thread.put]
            if not self.taken_when_free:
                waits = thread._replace(step=WAITS, begin=state.reserved)
                yield f"{name} receives slots for {count}", self._with(state, t, waits, state.reserved + count)
            elif self._has_room(state, state.reserved, count):
                fills = self._filling(thread, state.reserved, count)
                yield f"{name} takes slots for {count}", self._with(state, t, fills, state.reserved + count)
            elif self.gives_up:
                yield f"{name} gives up", self._with(state, t, thread._replace(step=GONE), state.reserved)
        elif thread.step == WAITS:
            count = self.puts[t][thread.put]
            if self._has_room(state, thread.begin, count):
                fills = self._filling(thread, thread.begin, count)
                yield f"{name}'s slots are free", self._with(state, t, fills, state.reserved)
            elif self.gives_up:
                yield f"{name} gives up", self._with(state, t, thread._replace(step=GONE), state.reserved)
        elif thread.step == FILLS:
            yield from self._store(state, t, thread)

    def _has_room(self, state: Ring, begin: int, count: int) -> bool:
        return begin + (count if self.room_for_all else 1) <= state.taken + self.commands

    def _filling(self, thread: Thread, begin: int, count: int) -> Thread:
        halves = tuple((command, half) for command in range(count) for half in (LOW, HIGH))
        return thread._replace(step=FILLS, begin=begin, stored=halves)

    def _store(self, state: Ring, t: int, thread: Thread) -> Iterator[Step[Ring]]:
        for one in thread.stored:
            command, half = one
            if command != thread.stored[0][0]:
                continue
            position = thread.begin + command
            lap = self._lap(position if self.lap_of_each_position else thread.begin)
            value = f"{command} of put {thread.put} of thread {t}"
            slot = with_item(state.slots[position % self.commands], half, (lap, value))
            slots = with_item(state.slots, position % self.commands, slot)
            left = tuple(other for other in thread.stored if other != one)
            after = thread._replace(stored=left) if left else Thread(thread.put + 1)
            stored = self._with(state._replace(slots=slots), t, after, state.reserved)
            yield f"thread {t} stores the {('lower', 'upper')[half]} half of command {value}", stored

    def _with(self, state: Ring, t: int, thread: Thread, reserved: int) -> Ring:
        return state._replace(threads=with_item(state.threads, t, thread), reserved=reserved)

    def _host(self, state: Ring) -> Iterator[Step[Ring]]:
        low, high = state.slots[state.taken % self.commands]
        lap = self._lap(state.taken)
        if high[0] != lap or (self.laps_in_both_halves and low[0] != lap):
            return
        wrong = ""
        if low[1] != high[1]:
            wrong = f"the host takes half of command {low[1] or 'none'} and half of command {high[1]}"
        elif low[1] in state.done:
            wrong = f"the host takes command {low[1]} again"
        after = state._replace(taken=state.taken + 1, done=(*state.done, high[1]), wrong=wrong)
        yield f"the host takes command {high[1]}", after

    def wrong(self, state: Ring) -> str | None:
        return state.wrong or None

    def ended(self, state: Ring) -> bool:
        """Return whether everything posted has been taken, and all threads have posted their puts or given up."""
        posted = sum(sum(self.puts[t][: thread.put]) for t, thread in enumerate(state.threads))
        rest = all(thread.step in (BEGINS, GONE) for thread in state.threads)
        return rest and len(state.done) == posted


# --- messages ---------------------------------------------------------------------------------------------------------

UNIT = 4
SEQUENCES, WINDOW = 4, 2
PUTS, USES = 2, 2  # of one word: a use is read when all its puts have arrived, and the next one follows
FLIES, REPEATED, ARRIVED = range(3)


class Word(NamedTuple):
    written: int = 1  # uses whose rows have been written to the source, which all uses share
    posted: int = 0  # uses, as commands
    sent: int = 0  # messages, of all uses in sequence
    flying: tuple[tuple[int, int], ...] = ()  # number of a message, and its state
    delivered: int = 0  # its sender knows that all earlier ones have been
    beyond: tuple[int, ...] = ()  # and these
    next: int = 0  # the receiver has counted all earlier ones
    seen: tuple[int, ...] = ()  # and these
    holds: tuple[int, ...] = ()  # by message of a use: the use whose row is stored there
    total: int = 0
    read: int = 0  # uses
    lost: int = -1  # a message that has failed
    ended: int = 0  # uses whose operation A has ended
    failed: bool = False  # A knows
    wrong: str = ""


@dataclass(frozen=True)
class Messages:
    """A's proxy sends the puts of a word to B's, each as two messages. These overtake each other, read their rows when
    they arrive, and may arrive twice before they are known to have arrived; at most one fails.
    """

    drops_repeats: bool = True
    last_says_how_many: bool = True  # without it the last message of a put adds a unit, whatever precedes it
    bounds_what_flies: bool = True  # without it a word's messages are all in flight at once
    retires_when_delivered: bool = True  # without it a command is done when it has been posted
    lost_is_not_done: bool = True  # without it a failed message, and those that wait behind it, count as done

    fails: int = 1  # whether a message may
    messages: int = 2  # of a put

    def initial(self) -> Word:
        return Word(holds=(0,) * (PUTS * self.messages))

    def steps(self, state: Word) -> Iterator[Step[Word]]:
        yield from self._kernel(state)
        yield from self._send(state)
        for one in state.flying:
            yield from self._network(state, *one)
        yield from self._reader(state)

    def _of_use(self) -> int:
        return PUTS * self.messages

    def _kernel(self, state: Word) -> Iterator[Step[Word]]:
        use = state.posted
        if use < USES and state.written == use + 1 and state.read == use:
            yield f"A's kernel leaves the commands of use {use}", state._replace(posted=use + 1)
        if state.ended < state.posted and not state.failed:
            use, count = state.ended, self._of_use()
            done = state.sent >= (use + 1) * count
            if self.retires_when_delivered:
                known = {*range(state.delivered), *state.beyond}
                delivered = all(number in known for number in range(use * count, (use + 1) * count))
                done = delivered or (state.lost >= 0 and not self.lost_is_not_done)
            if done:
                after = state._replace(ended=use + 1, written=min(state.written + 1, USES))
                yield f"A ends the operation of use {use}, and writes the rows of the next", after
        if state.lost >= 0 and self.lost_is_not_done and not state.failed:
            yield "A finds that a message has failed, and fails", state._replace(failed=True)

    def _send(self, state: Word) -> Iterator[Step[Word]]:
        number = state.sent
        open_ = number < state.delivered + WINDOW or not self.bounds_what_flies
        if number < state.posted * self._of_use() and open_ and state.lost < 0:
            flying = tuple(sorted((*state.flying, (number, FLIES))))
            yield f"A's proxy sends message {number}", state._replace(sent=number + 1, flying=flying)

    def _network(self, state: Word, number: int, how_far: int) -> Iterator[Step[Word]]:
        rest = tuple(one for one in state.flying if one != (number, how_far))
        name = f"message {number}"
        if how_far == ARRIVED:
            known = {*state.beyond, number}
            delivered = state.delivered
            while delivered in known:
                known.discard(delivered)
                delivered += 1
            after = state._replace(flying=rest, delivered=delivered, beyond=tuple(sorted(known)))
            yield f"A's proxy learns that {name} has been delivered", after
            return
        row = number % self._of_use()
        arrived = state
        if how_far == FLIES:
            # The contents of the source when the network reads it.
            arrived = state._replace(holds=with_item(state.holds, row, state.written))
            if self.fails and state.lost < 0:
                lost = state._replace(flying=rest, lost=number)
                yield f"{name} fails", lost
            twice = tuple(sorted((*rest, (number, REPEATED))))
            yield f"{name} arrives, and will again", self._counted(arrived._replace(flying=twice), number)
        once = tuple(sorted((*rest, (number, ARRIVED))))
        yield f"{name} arrives{' again' * (how_far == REPEATED)}", self._counted(arrived._replace(flying=once), number)

    def _counted(self, state: Word, number: int) -> Word:
        ahead = (number % SEQUENCES - state.next) % SEQUENCES
        if self.drops_repeats and (ahead >= WINDOW or state.next + ahead in state.seen):
            return state
        share = 1
        if number % self.messages == self.messages - 1:
            share = UNIT - (self.messages - 1 if self.last_says_how_many else 0)
        seen, following = {*state.seen, state.next + ahead}, state.next
        while following in seen:
            seen.discard(following)
            following += 1
        return state._replace(total=state.total + share, next=following, seen=tuple(sorted(seen)))

    def _reader(self, state: Word) -> Iterator[Step[Word]]:
        use = state.read
        if use < USES and state.total >= (use + 1) * PUTS * UNIT:
            found = [holds for holds in state.holds if holds != use + 1]
            what = "rows that have not arrived" if any(holds <= use for holds in found) else "rows of the next use"
            wrong = f"B places {what} for those of use {use}" if found else ""
            yield f"B reads use {use}", state._replace(read=use + 1, wrong=wrong)

    def wrong(self, state: Word) -> str | None:
        if state.lost >= 0 and state.ended > state.lost // self._of_use():
            return "A has succeeded, and B waits for a message that never arrives"
        return state.wrong or None

    def ended(self, state: Word) -> bool:
        """Return whether everything is done, or A has failed and notifies B."""
        return state.failed or (state.read == USES and state.ended == USES)
