"""Symmetric memory and queue pairs of this process: what Buffers have taken, and what can be reused.

Only all PEs together can allocate memory or create queue pairs, and neither is ever freed, so Buffers take from here.
What a Buffer has left is reused only by a Buffer of the same ranks that wants no more. When all of these ranks make the
new Buffer, all have left the old one, so none of its requests is still in flight.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from deep_ep_py.base.native import C
from deep_ep_py.transport.bootstrap.groups import Bootstrap
from deep_ep_py.transport.nvshmem.library import Library, NvshmemError
from deep_ep_py.transport.nvshmem.together import on_all

if TYPE_CHECKING:
    from deep_ep_py.transport.nvshmem.job import Job

_ALIGNMENT = 4096


@dataclass
class Block:
    """The memory of one allocation, at the same offset in the heap of every PE."""

    address: int
    size: int
    used: int = 0


@dataclass
class Queues:
    """Queue pairs to every PE that only their owner posts to, and the counters of what kernels post."""

    handles: list[int]
    counts: Any


@dataclass
class Part:
    """A Buffer's memory and queue pairs on this PE.

    Attributes
    ----------
    block : int
        Index of the `Block` that the memory is in.
    offset, size : int
        Place in the block, in bytes.
    queues : Queues or None
        None means NVSHMEM's own queue pairs, shared with its kernels.
    lease : native.C.nvshmem.Lease or None
        Lease of the heap in this memory.
    left : bool
        The Buffer has ended well: no request of this rank is in flight.
    """

    block: int
    offset: int
    size: int
    queues: Queues | None = None
    lease: Any = None
    left: bool = False

    @property
    def is_free(self) -> bool:
        """Whether nothing in this process uses it any longer."""
        return self.left and (self.lease is None or self.lease.ended)


@dataclass
class Pool:
    """The pool of one process, which has one NVSHMEM at a time.

    Attributes
    ----------
    blocks : list of Block
        In order of allocation, which is the same on all PEs.
    spare_queues : dict
        Queue pairs that no Buffer has yet, by their number.
    job : str
        If a Buffer has initialized NVSHMEM, a name that only its PEs know; empty if the program has.
    """

    blocks: list[Block] = field(default_factory=list)
    spare_queues: dict[int, list[Queues]] = field(default_factory=lambda: defaultdict(list))
    job: str = ""
    _parts: dict[tuple[int, ...], list[Part]] = field(default_factory=lambda: defaultdict(list))

    def begin(self, job: str) -> None:
        """Forget the state of a previous NVSHMEM, finalized since: a new one has been initialized."""
        self.job = job
        for one in (self.blocks, self.spare_queues, self._parts):
            one.clear()

    def reserve(self, bootstrap: Bootstrap, job: Job, size: int) -> None:
        """Allocate a block. Collective among all PEs, which are the ranks.

        Raises
        ------
        NvshmemError
            There is no room.
        """
        size = -(-size // _ALIGNMENT) * _ALIGNMENT
        address = on_all(bootstrap, partial(_allocate, job.library, size))[bootstrap.rank]
        self.blocks.append(Block(address, size))  # on all ranks or on none

    def take(self, bootstrap: Bootstrap, job: Job, size: int, queues: int) -> Part:
        """Take memory at the same place on all ranks of a Buffer, and queue pairs. Collective among them.

        Parameters
        ----------
        bootstrap : Bootstrap
            The ranks.
        job : Job
            The job, with the PEs of the ranks.
        size
            Size in bytes.
        queues
            Number of own queue pairs to each PE; 0 to use NVSHMEM's.

        Raises
        ------
        NvshmemError
            There is no room, or more could only be made by all PEs.
        """
        part = self._left(bootstrap, job, size, queues) or self._fresh(bootstrap, job, size, queues)
        part.left = False
        return part

    def address(self, part: Part) -> int:
        """Return the address of a part."""
        return self.blocks[part.block].address + part.offset

    def _left(self, bootstrap: Bootstrap, job: Job, size: int, queues: int) -> Part | None:
        """Return the smallest sufficient part that a Buffer of these ranks has left on all of them."""
        free = {
            (part.size, _count(part.queues), part.block, part.offset): part
            for part in self._parts[job.pes]
            if part.is_free and part.size >= size and _count(part.queues) >= queues
        }
        told = bootstrap.all_gather([[*place] for place in free])
        common = set.intersection(*({(*place,) for place in theirs} for theirs in told))
        return free[min(common)] if common else None

    def _fresh(self, bootstrap: Bootstrap, job: Job, size: int, queues: int) -> Part:
        place = self._room(bootstrap, size)
        lacks_queues = queues > 0 and not all(bootstrap.all_gather(bool(self.spare_queues[queues])))
        if (place is None or lacks_queues) and not job.is_whole:
            raise NvshmemError(
                f"heap='nvshmem': these ranks are {len(job.pes)} of NVSHMEM's {job.all_pes} PEs, which can only "
                f"{'allocate' if place is None else 'make queue pairs'} together: expected "
                f"all to have called deep_ep_py.nvshmem.reserve(group, {size}, num_qps_per_rank={max(1, job.queues)})"
            )
        if place is None:
            self.reserve(bootstrap, job, size)
            place = len(self.blocks) - 1, 0
        if lacks_queues:
            self.make_queues(bootstrap, job, queues)
        block, offset = place
        part = Part(block, offset, size, self.spare_queues[queues].pop() if queues else None)
        self.blocks[block].used = offset + size
        self._parts[job.pes].append(part)
        return part

    def make_queues(self, bootstrap: Bootstrap, job: Job, queues: int) -> None:
        """Create queue pairs for a Buffer. Collective among all PEs, which are the ranks."""
        made = list[Any]()
        # A step of its own: if a rank has no memory for it, the others must not wait in NVSHMEM.
        on_all(bootstrap, lambda: made.append(C.nvshmem.Counts(job.context, pes=job.all_pes, queues=queues)))
        on_all(bootstrap, lambda: made.append(job.library.make_queue_pairs(queues)))
        counts, handles = made
        self.spare_queues[queues].append(Queues(handles, counts))

    def _room(self, bootstrap: Bootstrap, size: int) -> tuple[int, int] | None:
        """Return the first block, and the place in it, with enough memory that was never used on any of the ranks."""
        told = bootstrap.all_gather([[block.size, block.used] for block in self.blocks])
        if len({tuple(block_size for block_size, _ in theirs) for theirs in told}) > 1:
            raise NvshmemError(
                "NVSHMEM: these ranks do not have the same symmetric memory, for example because a Buffer's "
                "construction was interrupted on some; expected new processes"
            )
        for place, block in enumerate(self.blocks):
            offset = max(theirs[place][1] for theirs in told)
            offset = -(-offset // _ALIGNMENT) * _ALIGNMENT
            if offset + size <= block.size:
                return place, offset
        return None


def _allocate(library: Library, size: int) -> int:
    address = library.allocate(_ALIGNMENT, size)
    if address == 0:
        raise NvshmemError(
            f"NVSHMEM's symmetric heap has no room for {size} bytes: expected a smaller arena_bytes, or more free "
            "memory of the GPU; with NVSHMEM_DISABLE_CUDA_VMM=1 a larger NVSHMEM_SYMMETRIC_SIZE"
        )
    return address


def _count(queues: Queues | None) -> int:
    return 0 if queues is None else len(queues.handles)


@cache
def pool() -> Pool:
    """Return this process's pool."""
    return Pool()
