"""P14: a send queue that a Buffer's kernels share with those of another library, which post in another way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from .explore import Step, with_item

NOTHING = -1
BEGINS, LOOKS, TAKES, FILLS, TURNS, PUBLISHES, RINGS, GONE = range(8)


class Thread(NamedTuple):
    posted: int = 0  # number of its puts
    step: int = BEGINS
    begin: int = 0  # the first WQEBB of the put in progress
    told: bool = False  # to give up
    leaves: bool = False  # the doorbell to later threads


class Queue(NamedTuple):
    ring: tuple[int, ...]  # by WQEBB: the index of the request that is stored there
    threads: tuple[Thread, ...]
    reserved: int = 0
    filled: int = 0
    rung: int = 0
    completed: int = 0
    wrong: str = ""


@dataclass(frozen=True)
class Posting:
    """Two threads of ours and one of another library post to a ring of four WQEBBs. Ours may be told to give up at any
    time. The other one reserves WQEBBs first and then waits for room, without ringing; it cannot give up.
    """

    taken_when_free: bool = True  # without it our threads reserve WQEBBs first, too
    looks_again: bool = True  # without it the WQEBBs are taken wherever `reserved` is after the check
    room_for_all: bool = True  # without it a put takes its WQEBBs when the first of them is free
    in_turn: bool = True  # without it WQEBBs become valid whether or not the earlier ones are
    waits_out_its_turn: bool = True  # without it a thread that is told leaves while it waits for its turn
    publishes_when_told: bool = True  # without it a thread that is told leaves when its turn comes
    last_rings: bool = True  # without it the doorbell is always left to a later thread
    rings_in_time: bool = True  # without it the doorbell is left to later threads for as long as there are any
    gives_up: int = 1  # whether threads may be told
    blocks: int = 4  # of the ring
    puts: tuple[tuple[int, ...], ...] = ((2, 1), (1, 2), (1, 1))  # blocks of each put; the last thread is the other's

    def initial(self) -> Queue:
        return Queue((NOTHING,) * self.blocks, (Thread(),) * len(self.puts))

    def steps(self, state: Queue) -> Iterator[Step[Queue]]:
        for t, thread in enumerate(state.threads):
            if thread.step == GONE or (thread.step == BEGINS and thread.posted == len(self.puts[t])):
                continue
            if self._is_ours(t):
                yield from self._ours(state, t, thread)
            else:
                yield from self._others(state, t, thread)
        yield from self._nic(state)

    def _is_ours(self, t: int) -> bool:
        return t < len(self.puts) - 1

    def _name(self, t: int) -> str:
        return f"thread {t}" if self._is_ours(t) else "the other's thread"

    def _end(self, t: int, thread: Thread) -> int:
        return thread.begin + self.puts[t][thread.posted]

    def _ours(self, state: Queue, t: int, thread: Thread) -> Iterator[Step[Queue]]:
        name = self._name(t)
        if self.gives_up and not thread.told and thread.step in (LOOKS, TURNS):  # where it makes a difference
            yield f"{name} is told to give up", self._with(state, t, thread._replace(told=True))
        if thread.step == BEGINS:
            looks = thread._replace(step=LOOKS, begin=state.reserved)
            after = self._with(state, t, looks)
            if not self.taken_when_free:
                after = after._replace(reserved=self._end(t, looks))
            yield f"{name} reads that {state.reserved} are reserved", after
        elif thread.step == LOOKS:
            if thread.told:
                yield f"{name} gives up without room", self._with(state, t, thread._replace(step=GONE))
            elif self._has_room(state, t, thread):
                then = TAKES if self.taken_when_free else FILLS
                yield f"{name} finds room", self._with(state, t, thread._replace(step=then))
            elif state.filled > state.rung:
                yield f"{name} rings while it waits", state._replace(rung=state.filled)
        elif thread.step == TAKES:
            yield self._take(state, t, thread)
        elif thread.step == TURNS and thread.told and not self.waits_out_its_turn and state.filled != thread.begin:
            yield f"{name} gives up before its turn", self._with(state, t, thread._replace(step=GONE))
        elif thread.step == TURNS and thread.told and not self.publishes_when_told and state.filled == thread.begin:
            yield f"{name} gives up in its turn", self._with(state, t, thread._replace(step=GONE))
        else:
            yield from self._fill(state, t, thread)

    def _take(self, state: Queue, t: int, thread: Thread) -> Step[Queue]:
        name = self._name(t)
        if state.reserved != thread.begin and self.looks_again:
            again = thread._replace(step=LOOKS, begin=state.reserved)
            return f"{name} finds its WQEBBs taken", self._with(state, t, again)
        takes = thread._replace(step=FILLS, begin=state.reserved)
        after = self._with(state, t, takes)._replace(reserved=self._end(t, takes))
        return f"{name} reserves WQEBBs from {takes.begin} on", after

    def _has_room(self, state: Queue, t: int, thread: Thread) -> bool:
        end = self._end(t, thread) if self.room_for_all else thread.begin + 1
        return end <= state.completed + self.blocks

    def _others(self, state: Queue, t: int, thread: Thread) -> Iterator[Step[Queue]]:
        name = self._name(t)
        if thread.step == BEGINS:
            takes = thread._replace(step=LOOKS, begin=state.reserved)
            after = self._with(state, t, takes)._replace(reserved=self._end(t, takes))
            yield f"{name} reserves WQEBBs from {takes.begin} on", after
        elif thread.step == LOOKS:
            if self._end(t, thread) <= state.completed + self.blocks:
                yield f"{name} finds room", self._with(state, t, thread._replace(step=FILLS))
        else:
            yield from self._fill(state, t, thread)

    def _fill(self, state: Queue, t: int, thread: Thread) -> Iterator[Step[Queue]]:
        """Perform the steps common to all threads once they have free WQEBBs."""
        name, end = self._name(t), self._end(t, thread)
        if thread.step == FILLS:
            ring = state.ring
            for index in range(thread.begin, end):
                ring = with_item(ring, index % self.blocks, index)
            after = self._with(state._replace(ring=ring), t, thread._replace(step=TURNS))
            yield f"{name} writes requests {thread.begin} to {end - 1}", after
        elif thread.step == TURNS and (state.filled == thread.begin or (self._is_ours(t) and not self.in_turn)):
            # The other library rings for each of its own.
            in_time = not self._is_ours(t) or (self.rings_in_time and end > state.rung + self.blocks // 4)
            rings = in_time or (state.reserved == end and self.last_rings)
            looked = thread._replace(step=PUBLISHES, leaves=not rings)
            yield f"{name} decides, in its turn, whether to ring", self._with(state, t, looked)
        elif thread.step == PUBLISHES:
            filled = state.filled + end - thread.begin
            after = self._with(state, t, thread._replace(step=RINGS))._replace(filled=filled)
            yield f"{name} makes requests up to {filled - 1} valid", after
        elif thread.step == RINGS:
            after = self._with(state, t, thread._replace(step=BEGINS, posted=thread.posted + 1, leaves=False))
            if thread.leaves:
                yield f"{name} leaves the doorbell to later threads", after
            else:
                yield f"{name} rings", after._replace(rung=max(state.rung, state.filled))

    def _with(self, state: Queue, t: int, thread: Thread) -> Queue:
        return state._replace(threads=with_item(state.threads, t, thread))

    def _nic(self, state: Queue) -> Iterator[Step[Queue]]:
        index = state.completed
        if index < state.rung:
            found = state.ring[index % self.blocks]
            wrong = f"the NIC finds request {found} in the place of {index}" if found != index else ""
            yield f"the NIC completes request {index}", state._replace(completed=index + 1, wrong=wrong)

    def wrong(self, state: Queue) -> str | None:
        return state.wrong or None

    def ended(self, state: Queue) -> bool:
        """Return whether all have posted or given up, and everything reserved is done: others can keep posting."""
        rest = all(
            thread.step == GONE or (thread.step == BEGINS and thread.posted == len(self.puts[t]))
            for t, thread in enumerate(state.threads)
        )
        return rest and state.reserved == state.filled == state.completed
