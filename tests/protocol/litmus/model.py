"""The axioms of the PTX ISA's chapter "Memory Consistency Model", evaluated over every execution of a small program.

Parts that the idioms do not use are left out: sequentially consistent fences, proxies, vectors, volatile accesses. A
thread's device stands for the set of threads that GPU scope includes; hosts and NICs are threads with system scope on
devices of their own. That a NIC keeps the order of a queue pair is not an axiom of PTX: here a NIC is a thread whose
atomic releases its earlier stores.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from .program import CTA, GPU, SYS, Outcome, Program, Thread

Pair = tuple[int, int]


@dataclass(frozen=True)
class Event:
    """An effect of an instruction: a read, a write, a fence, or a barrier. An atomic is a read and a write."""

    kind: str  # R, W, F, B
    thread: int  # -1: the initial value
    place: str
    order: str
    scope: str
    value: int | str = 0
    register: str = ""
    barrier: int = 0
    atomic: int = 0  # number of the atomic that it belongs to, from 1


def _events(program: Program) -> list[Event]:
    places = {instruction.place for thread in program.threads for instruction in thread.instructions} - {""}
    events = [Event("W", -1, place, "weak", "", program.initial.get(place, 0)) for place in sorted(places)]
    atomics = 0
    for number, thread in enumerate(program.threads):
        for one in thread.instructions:
            if one.kind == "barrier":
                events.append(Event("B", number, "", "acq_rel", CTA, barrier=one.barrier))
            elif one.kind == "fence":
                events.append(Event("F", number, "", one.order, one.scope))
            elif one.kind == "load":
                events.append(Event("R", number, one.place, one.order, one.scope, register=one.register))
            elif one.kind == "store":
                events.append(Event("W", number, one.place, one.order, one.scope, one.value))
            else:
                atomics += 1
                reads = {"acq_rel": "acquire", "acquire": "acquire"}.get(one.order, "relaxed")
                writes = {"acq_rel": "release", "release": "release"}.get(one.order, "relaxed")
                events.append(Event("R", number, one.place, reads, one.scope, 0, one.register, 0, atomics))
                events.append(Event("W", number, one.place, writes, one.scope, one.value, "", 0, atomics))
    return events


def _closure(pairs: set[Pair], size: int) -> set[Pair]:
    after: list[set[int]] = [set() for _ in range(size)]
    for a, b in pairs:
        after[a].add(b)
    for middle in range(size):
        for a in range(size):
            if middle in after[a]:
                after[a] |= after[middle]
    return {(a, b) for a in range(size) for b in after[a]}


def _cyclic(pairs: set[Pair], size: int) -> bool:
    return any(a == b for a, b in _closure(pairs, size))


class Executions:
    """All executions of a program that the axioms allow.

    Parameters
    ----------
    program
        The program.
    program_order_is_causal
        Versions of the text differ in whether program order alone is part of causality. With it fewer executions are
        allowed: forbidden outcomes are searched for without it, the need for a part with it.
    """

    def __init__(self, program: Program, program_order_is_causal: bool = False) -> None:
        self._program_order_is_causal = program_order_is_causal
        self._threads = program.threads
        self._events = _events(program)
        size = self._size = len(self._events)
        ids = range(size)
        of = self._events
        self._program_order = {(a, b) for a in ids for b in ids if of[a].thread == of[b].thread >= 0 and a < b}
        self._overlap = {(a, b) for a in ids for b in ids if a != b and of[a].place and of[a].place == of[b].place}
        self._strong = {(a, b) for a in ids for b in ids if a != b and self._morally_strong(a, b)}
        self._barriers = {
            (a, b)
            for a in ids
            for b in ids
            if of[a].kind == of[b].kind == "B"
            and of[a].thread != of[b].thread
            and of[a].barrier == of[b].barrier
            and self._covers(of[a].thread, of[b].thread, CTA)
        }

    def _covers(self, one: int, other: int, scope: str) -> bool:
        if one < 0 or other < 0:
            return True
        a: Thread = self._threads[one]
        b: Thread = self._threads[other]
        return {
            SYS: True,
            GPU: a.device == b.device,
            CTA: a.device == b.device and a.block == b.block,
        }.get(scope, False)

    # Related in program order; or both strong, each with a scope that includes the other's thread.
    def _morally_strong(self, a: int, b: int) -> bool:
        one, other = self._events[a], self._events[b]
        if one.thread < 0 or other.thread < 0 or one.thread == other.thread:
            return True
        if "weak" in (one.order, other.order):
            return False
        return self._covers(one.thread, other.thread, one.scope) and self._covers(other.thread, one.thread, other.scope)

    def outcomes(self) -> Iterator[Outcome]:
        """Yield the final registers of each allowed execution."""
        reads = [i for i, event in enumerate(self._events) if event.kind == "R"]
        writes = [i for i, event in enumerate(self._events) if event.kind == "W"]
        sources = [[w for w in writes if (w, r) in self._overlap and not self._same_atomic(w, r)] for r in reads]
        for chosen in itertools.product(*sources):
            reads_from = dict(zip(reads, chosen, strict=True))
            values = self._values(reads_from)
            if values is None:  # out of thin air
                continue
            causality = self._causality(reads_from)
            if any(self._allowed(reads_from, causality, order) for order in self._coherence_orders(writes, causality)):
                yield {self._events[r].register: values[r] for r in reads}

    def _same_atomic(self, a: int, b: int) -> bool:
        return self._events[a].atomic != 0 and self._events[a].atomic == self._events[b].atomic

    def _values(self, reads_from: dict[int, int]) -> dict[int, int] | None:
        values: dict[int, int] = {}

        def value(i: int, above: tuple[int, ...] = ()) -> int | None:
            if i in values:
                return values[i]
            if i in above:
                return None
            event, path = self._events[i], (*above, i)
            found: int | None
            if event.kind == "R":
                found = value(reads_from[i], path)
            elif event.atomic:
                old = value(i - 1, path)
                found = None if old is None else old + int(event.value)
            elif isinstance(event.value, str):
                (source,) = (j for j, other in enumerate(self._events) if other.register == event.value)
                found = value(source, path)
            else:
                found = event.value
            if found is not None:
                values[i] = found
            return found

        everything = [i for i, event in enumerate(self._events) if event.place]
        return values if all(value(i) is not None for i in everything) else None

    def _causality(self, reads_from: dict[int, int]) -> set[Pair]:
        of = self._events
        # Observation: a strong read of a write, also through atomics that have read it.
        observed = {(w, r) for r, w in reads_from.items() if (w, r) in self._strong}
        through = {(a, b) for a, b in itertools.product(range(self._size), repeat=2) if b == a + 1 and of[a].atomic}
        steps = observed | {(r, w) for r, w in through if self._same_atomic(r, w)}
        observation = {(w, r) for w, r in _closure(steps, self._size) if of[w].kind == "W" and of[r].kind == "R"}
        # Synchronizes-with: a release pattern (a release, or a fence with a strong write behind it) that an acquire
        # pattern has observed (an acquire, or a strong read with a fence behind it), morally strong; and barriers.
        fenced = {(a, b) for a, b in self._program_order if "weak" not in (of[a].order, of[b].order)}
        releases = {(w, w) for w, _ in observation if of[w].order == "release"}
        releases |= {(w, f) for f, w in fenced if of[f].kind == "F"}
        acquires = {(r, r) for _, r in observation if of[r].order == "acquire"}
        acquires |= {(r, f) for r, f in fenced if of[f].kind == "F"}
        synchronizes = {
            (first, last)
            for w, r in observation
            for write, first in releases
            for read, last in acquires
            if (write, read) == (w, r) and (first, last) in self._strong
        } | self._barriers
        base = {
            (a, b)
            for a, b in _closure(synchronizes | self._program_order, self._size)
            if (a, b) not in self._program_order and self._crosses(a, b, synchronizes)
        }
        if self._program_order_is_causal:
            base |= self._program_order
        return base | {(a, c) for a, b in observation for d, c in base if b == d}

    # Whether some synchronization is on the path from a to b; program order alone does not count.
    def _crosses(self, a: int, b: int, synchronizes: set[Pair]) -> bool:
        return bool(synchronizes) and self._events[a].thread != self._events[b].thread or (a, b) in synchronizes

    def _coherence_orders(self, writes: list[int], causality: set[Pair]) -> Iterator[set[Pair]]:
        """Yield the orders of writes to each place: total where morally strong or in causality, otherwise arbitrary."""
        initial = {(a, b) for a in writes for b in writes if (a, b) in self._overlap and self._events[a].thread < 0}
        pairs = [
            (a, b)
            for a, b in itertools.combinations(writes, 2)
            if (a, b) in self._overlap and self._events[a].thread >= 0
        ]
        for choice in itertools.product((1, -1, 0), repeat=len(pairs)):
            order = set(initial)
            legal = True
            for (a, b), direction in zip(pairs, choice, strict=True):
                if direction:
                    order.add((a, b) if direction > 0 else (b, a))
                elif (a, b) in self._strong or (a, b) in causality or (b, a) in causality:
                    legal = False
            if legal and not _cyclic(order, self._size):
                yield _closure(order, self._size)

    def _allowed(self, reads_from: dict[int, int], causality: set[Pair], coherence: set[Pair]) -> bool:
        of, overlap = self._events, self._overlap
        writes = [i for i, event in enumerate(of) if event.kind == "W"]
        # Coherence.
        if any((a, b) in overlap and (a, b) not in coherence for a, b in causality if {a, b} <= set(writes)):
            return False
        from_read = {(r, w) for r, source in reads_from.items() for w in writes if (source, w) in coherence}
        # Atomicity: no morally strong write between an atomic's read and its write.
        for r, w in from_read:
            for mine in writes:
                if self._same_atomic(r, mine) and (w, mine) in coherence and (w, mine) in self._strong:
                    return False
        # Sequential consistency per place, among the morally strong.
        communication = {(w, r) for r, w in reads_from.items()} | coherence | from_read
        ordered = {pair for pair in self._program_order if pair in overlap}
        if _cyclic({pair for pair in communication if pair in self._strong} | ordered, self._size):
            return False
        # Causality: a read sees no later write, and nothing older than an earlier write.
        for r, source in reads_from.items():
            if (r, source) in causality:
                return False
            if any((w, r) in causality and (w, r) in overlap and (source, w) in coherence for w in writes):
                return False
        return True
