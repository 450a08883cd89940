"""A Buffer's heaps in NVSHMEM's symmetric heap, with NVSHMEM's queue pairs to ranks whose heaps are not mapped."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from deep_ep_py.base.native import C
from deep_ep_py.transport.bootstrap.groups import Bootstrap
from deep_ep_py.transport.nvshmem.job import Job, join
from deep_ep_py.transport.nvshmem.library import NvshmemError
from deep_ep_py.transport.nvshmem.pool import Part
from deep_ep_py.transport.nvshmem.probe import read_states
from deep_ep_py.transport.nvshmem.settings import refusal_of_order
from deep_ep_py.transport.nvshmem.together import on_all

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class NvshmemMemory:
    """A rank's memory and queue pairs in NVSHMEM for one Buffer. It does not grow (P10), as all PEs allocate at once.

    Parameters
    ----------
    bootstrap : Bootstrap
        The ranks. Collective among them.
    machines : sequence of int
        The machine of each rank.
    context : native.C.cuda.Context
        The context of this rank's GPU.
    queues
        Queue pairs to each peer; if NVSHMEM cannot create others, at most this many of those that it shares.

    Raises
    ------
    NvshmemError
        A rank has failed. Raised on all ranks.
    """

    def __init__(self, bootstrap: Bootstrap, machines: Sequence[int], context: Any, queues: int) -> None:
        self.job: Job = join(bootstrap, context, queues)
        self._rank, self._machines = bootstrap.rank, machines
        self._part: Part | None = None
        told = on_all(bootstrap, self._look)
        if len({(nics, per_nic) for nics, per_nic in told if nics}) > 1:
            raise NvshmemError(
                "NVSHMEM: expected equal numbers of NICs and queue pairs on all PEs (NVSHMEM_IBGDA_NUM_RC_PER_PE, "
                f"NVSHMEM_HCA_LIST), found {[(nics, per_nic) for nics, per_nic in told]} by rank"
            )
        nics, per_nic = told[self._rank]
        self._own = self.job.has_own_queues
        self._queues = max(1, queues if self._own else min(queues, nics * per_nic))

    def _look(self) -> tuple[int, int]:
        """Return how many NICs NVSHMEM's kernels use, and how many shared queue pairs to each PE they have on each."""
        self._read_states()
        for rank, pe in enumerate(self.job.pes):
            if self._is_near(rank) and not self.job.library.mapped(self._states.heap, pe):
                raise NvshmemError(
                    f"NVSHMEM does not map the memory of rank {rank}, which is on the same machine: expected "
                    "NVSHMEM_DISABLE_P2P unset, and GPUs that reach each other"
                )
        return C.nvshmem.shared_queues(self.job.library.version, self._states.ibgda)

    def _read_states(self) -> None:
        with self.job.context.current():
            self._states = read_states(self.job.library, self.job.context)

    def _is_near(self, rank: int) -> bool:
        return self._machines[rank] == self._machines[self._rank]

    def refusal_of_nic(self, peer: int) -> str:
        """Return why NVSHMEM's queue pairs do not reach a rank; empty if they do."""
        if not self.job.context.orders_nic_writes:
            return (
                "this GPU's running kernels do not see a NIC's writes in order (GPU_DIRECT_RDMA_WRITES_ORDERING is 0), "
                "so a signal could be seen before the rows that precede it"
            )
        if why := refusal_of_order(os.environ):
            return why
        try:
            C.nvshmem.check(self.job.context, self._wanted([rank == peer for rank in range(len(self._machines))]))
        except C.nvshmem.Refused as error:
            return str(error)
        return ""

    def check_far_ranks(self) -> None:
        """Check that NVSHMEM's queue pairs reach every rank on another machine.

        Raises
        ------
        NvshmemError
            One is not reached; the message says why.
        """
        for peer in range(len(self._machines)):
            why = "" if self._is_near(peer) else self.refusal_of_nic(peer)
            if why:
                raise NvshmemError(f"rank {peer} is not reached: {why}")

    def make_heaps(
        self, bootstrap: Bootstrap, size: int, cleared: int, by_nics: bool, make_copy: Callable[[], Any]
    ) -> tuple[list[C.Heap], C.nvshmem.Wanted]:
        """Take memory for this rank's heap, at the same place on all ranks, and find theirs. Collective among them.

        Parameters
        ----------
        bootstrap : Bootstrap
            The ranks.
        size
            Size of a heap in bytes.
        cleared
            How many of its first bytes are zero before any peer can reach them.
        by_nics
            Whether some ranks are reached by NICs, which needs queue pairs.
        make_copy : callable
            Allocates memory for a copy of the first bytes of a heap that is not mapped here.

        Returns
        -------
        heaps : list of native.C.Heap
            The heaps by rank.
        wanted : native.C.nvshmem.Wanted
            The queue pairs and keys that go with them.

        Raises
        ------
        NvshmemError
            NVSHMEM has no room, no more queue pairs, or memory of another GPU. Raised on all ranks.
        """
        with self.job.context.current():
            self._part = part = self.job.pool.take(
                bootstrap, self.job, size, self._queues if self._own and by_nics else 0
            )
        address = self.job.pool.address(part)
        offset = address - self._states.heap

        def clear() -> int:
            if not self.job.context.owns(address):
                raise NvshmemError(
                    f"NVSHMEM was initialized with another GPU than this Buffer's, cuda:{self.job.context.ordinal}: "
                    "expected torch.cuda.set_device with the Buffer's GPU before NVSHMEM is initialized"
                )
            part.lease = C.nvshmem.lease(self.job.context, address, size, cleared)
            return offset

        # No rank stores into another's heap before it is cleared.
        _check_places(on_all(bootstrap, clear))
        own = part.lease.take()
        heaps = [
            own if rank == self._rank else self._heap_of(address, size, pe) if self._is_near(rank) else make_copy()
            for rank, pe in enumerate(self.job.pes)
        ]
        on_all(bootstrap, self._read_states)  # with the keys of the new memory
        return heaps, self._wanted([], offset, size)

    def leave(self) -> None:
        """Mark the Buffer as ended well, or never begun: its part may be reused once it holds no output."""
        if self._part is not None:
            self._part.left = True
            if self._part.lease is not None:
                self._part.lease.take()  # a heap that no Buffer has used

    def _heap_of(self, address: int, size: int, pe: int) -> C.Heap:
        mapped = self.job.library.mapped(address, pe)
        return C.nvshmem.lease(self.job.context, mapped, size, 0).take()

    def _wanted(self, reached: list[bool], offset: int = 0, size: int = 0) -> C.nvshmem.Wanted:
        queues = self._part.queues if self._part is not None else None
        shared = self._own and queues is None  # no own ones yet: check the shared ones
        return C.nvshmem.Wanted(
            version=self.job.library.version,
            device_state=self._states.device,
            ibgda_state=self._states.ibgda,
            pes=self.job.pes,
            reached=reached,
            rank=self._rank,
            heap_offset=offset,
            heap_bytes=size,
            queues=1 if shared else self._queues,
            handles=queues.handles[: self._queues] if queues else [],
            counts=queues.counts.address if queues else 0,
        )


def _check_places(offsets: Sequence[int]) -> None:
    """Check that a Buffer's memory is at the same place in the heaps of all its ranks."""
    if len({*offsets}) > 1:
        raise NvshmemError(
            f"NVSHMEM: this Buffer's memory begins at bytes {[*offsets]} of the ranks' heaps; expected the same place "
            "on all: each PE must make Buffers, and allocate, in the same order, with one thread at a time"
        )
