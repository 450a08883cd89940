"""The memory that Buffers take from NVSHMEM: at the same offset on all of their ranks, and never where rows of another
Buffer may still arrive."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from deep_ep_py.transport.nvshmem.library import NvshmemError
from deep_ep_py.transport.nvshmem.pool import Part, Pool

pytestmark = pytest.mark.once

PES = 4
GROUPS = [(0, 1, 2, 3), (0, 1), (2, 3), (1, 2), (0, 3, 1)]
SECONDS = 10.0


class Gathering:
    """An exchange of values among threads that stand for ranks."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size, timeout=SECONDS)
        self._values: list[Any] = [None] * size

    def all_gather(self, rank: int, value: Any) -> list[Any]:
        self._values[rank] = value
        self._barrier.wait()
        told = [*self._values]
        self._barrier.wait()
        return told


@dataclass
class Symmetric:
    """The symmetric heap of one PE, whose allocations all PEs make in the same order."""

    room: int = 1 << 20
    used: int = 4096

    def allocate(self, alignment: int, size: int) -> int:
        address = -(-self.used // alignment) * alignment
        if address + size > self.room:
            return 0
        self.used = address + size
        return address


@dataclass
class Lease:
    """The lease of a heap and the outputs in it."""

    ended: bool = False


@dataclass
class World:
    """All PEs of a job, each with its pool."""

    pools: list[Pool] = field(default_factory=lambda: [Pool() for _ in range(PES)])
    heaps: list[Symmetric] = field(default_factory=lambda: [Symmetric() for _ in range(PES)])

    def take(self, pes: Sequence[int], size: int) -> list[Part]:
        """Return the parts that the ranks of a Buffer take, or raise what they raise."""
        gathering = Gathering(len(pes))

        def on_rank(rank: int) -> Part:
            pe = pes[rank]
            bootstrap: Any = SimpleNamespace(rank=rank, all_gather=lambda value: gathering.all_gather(rank, value))
            whole = len(pes) == PES
            job: Any = SimpleNamespace(
                library=self.heaps[pe], pes=tuple(pes), all_pes=PES, queues=0, is_whole=whole, context=None
            )
            part = self.pools[pe].take(bootstrap, job, size, 0)
            part.lease = Lease()
            return part

        with ThreadPoolExecutor(len(pes)) as threads:
            return [one.result() for one in [threads.submit(on_rank, rank) for rank in range(len(pes))]]

    def reserve(self, size: int) -> None:
        alone: Any = SimpleNamespace(rank=0, all_gather=lambda value: [value])
        for pool, heap in zip(self.pools, self.heaps, strict=True):
            job: Any = SimpleNamespace(library=heap)
            pool.reserve(alone, job, size)

    def place(self, pe: int, part: Part) -> range:
        address = self.pools[pe].address(part)
        return range(address, address + part.size)


@pytest.mark.parametrize("seed", range(30))
def test_no_two_buffers_share_memory(seed: int) -> None:
    """Memory of a Buffer is reused only when all of its ranks have left it and hold no output in it."""
    draw, world = random.Random(seed), World()
    world.reserve(100_000)
    alive: list[tuple[tuple[int, ...], list[Part]]] = []
    taken = 0
    for _ in range(60):
        if alive and draw.random() < 0.5:
            pes, parts = draw.choice(alive)
            for part in parts:  # perhaps only of some ranks
                if draw.random() < 0.8:
                    part.left, part.lease.ended = True, draw.random() < 0.8
            if all(part.left and part.lease.ended for part in parts):
                alive.remove((pes, parts))
            continue
        pes = draw.choice(GROUPS)
        try:
            parts = world.take(pes, draw.choice((4096, 10_000, 50_000)))
        except NvshmemError as error:
            assert "reserve(group," in str(error) or "has no room" in str(error)
            continue
        taken += 1
        places = [world.place(pe, part) for pe, part in zip(pes, parts, strict=True)]
        assert len(set(places)) == 1, "not at the same place on all ranks"
        for others, theirs in alive:
            for pe in {*pes} & {*others}:
                other = world.place(pe, theirs[others.index(pe)])
                mine = places[0]
                assert mine.stop <= other.start or other.stop <= mine.start, (pes, others, mine, other)
        alive.append((pes, parts))
    assert taken > 10


def test_what_all_have_left_is_taken_again() -> None:
    world = World()
    first = world.take((0, 1, 2, 3), 4096)
    for part in first[:3]:
        part.left, part.lease.ended = True, True
    second = world.take((0, 1, 2, 3), 4096)
    assert [part.offset for part in second] == [0] * 4 and second[0].block == 1, "one rank has not left the first"
    for part in (first[3], *second):
        part.left, part.lease.ended = True, True
    third = world.take((0, 1, 2, 3), 4096)
    assert third[0] in (first[0], second[0])
    assert len(world.pools[0].blocks) == 2


def test_a_smaller_buffer_takes_what_a_larger_one_has_left() -> None:
    world = World()
    for size in (10_000, 50_000, 20_000):
        for part in world.take((0, 1, 2, 3), size):
            part.left, part.lease.ended = True, True
    assert len(world.pools[0].blocks) == 2, "expected blocks of 10000 and 50000 bytes"
    assert world.take((0, 1, 2, 3), 8_000)[0].size == 10_000, "the smallest block that fits must be taken"


def test_others_do_not_take_it() -> None:
    """The third rank knows nothing of a Buffer of two ranks: memory that it takes might still be written."""
    world = World()
    world.reserve(3 * 4096)
    first = world.take((0, 1), 4096)
    for part in first:
        part.left, part.lease.ended = True, True
    other = world.take((1, 2), 4096)
    assert world.place(1, other[0]).start >= world.place(1, first[1]).stop


def test_some_of_the_pes_cannot_allocate() -> None:
    world = World()
    with pytest.raises(NvshmemError, match=r"these ranks are 2 of NVSHMEM's 4 PEs, .*reserve\(group, 8192"):
        world.take((0, 1), 8192)
    world.reserve(8192)
    assert len(world.take((0, 1), 8192)) == 2


def test_no_room() -> None:
    with pytest.raises(NvshmemError, match="symmetric heap has no room for 2097152 bytes"):
        World().take((0, 1, 2, 3), 2 << 20)


def test_no_room_on_one() -> None:
    """No rank has a block that another lacks, because blocks are identified by their numbers."""
    world = World()
    world.heaps[2].room = 8192
    with pytest.raises(NvshmemError, match="symmetric heap has no room for 16384 bytes"):
        world.take((0, 1, 2, 3), 16_384)
    assert [len(pool.blocks) for pool in world.pools] == [0] * PES
    assert {part.block for part in world.take((0, 1, 2, 3), 4096)} == {0}


def test_memory_of_some_alone() -> None:
    """An interrupted rank has not recorded a block that the others have: no rank continues to the collective call."""
    world = World()
    world.reserve(8192)
    world.pools[1].blocks.pop()
    with pytest.raises(NvshmemError, match="do not have the same symmetric memory"):
        world.take((0, 1, 2, 3), 4096)
