"""A Buffer's heaps in NVSHMEM's symmetric heap, with NVSHMEM's queue pairs for what its ranks do not map."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deep_ep_py.bootstrap.groups import Bootstrap
from deep_ep_py.core.native import C
from deep_ep_py.nvshmem.job import Job, join
from deep_ep_py.nvshmem.library import NvshmemError
from deep_ep_py.nvshmem.pool import Part
from deep_ep_py.nvshmem.probe import read_states
from deep_ep_py.nvshmem.together import on_all

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class NvshmemMemory:
    """What a rank has of NVSHMEM for one Buffer. It does not grow (P10): all PEs allocate at once.

    Parameters
    ----------
    bootstrap : Bootstrap
        The ranks. Collective among them.
    machines : sequence of int
        By rank: which machine it is on.
    context : native.C.cuda.Context
        Of this rank's GPU.
    queues
        Queue pairs to each peer: at most so many of those that NVSHMEM shares, where it cannot make others.

    Raises
    ------
    NvshmemError
        On all ranks.
    """

    def __init__(self, bootstrap: Bootstrap, machines: Sequence[int], context: Any, queues: int) -> None:
        self.job: Job = join(bootstrap, context, queues)
        self._rank, self._machines = bootstrap.rank, machines
        self._part: Part | None = None
        told = on_all(bootstrap, self._look)
        if len({(nics, per_nic) for nics, per_nic in told if nics}) > 1:
            raise NvshmemError(
                "NVSHMEM: expected as many NICs and queue pairs on all PEs (NVSHMEM_IBGDA_NUM_RC_PER_PE, "
                f"NVSHMEM_HCA_LIST), their numbers are {[(nics, per_nic) for nics, per_nic in told]} by rank"
            )
        nics, per_nic = told[self._rank]
        self._own = self.job.has_own_queues
        self._queues = max(1, queues if self._own else min(queues, nics * per_nic))

    def _look(self) -> tuple[int, int]:
        """Return how many NICs NVSHMEM's kernels use, and how many queue pairs to each PE they share on each."""
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
        """Return why NVSHMEM's queue pairs do not lead to a rank; empty: they do."""
        if not self.job.context.orders_nic_writes:
            return (
                "this GPU's running kernels do not see a NIC's writes in order (GPU_DIRECT_RDMA_WRITES_ORDERING is 0), "
                "so a signal could be seen before the rows in front of it"
            )
        try:
            C.nvshmem.check(self.job.context, self._wanted([rank == peer for rank in range(len(self._machines))]))
        except C.nvshmem.Refused as error:
            return str(error)
        return ""

    def make_heaps(
        self, bootstrap: Bootstrap, size: int, cleared: int, by_nics: bool, make_copy: Callable[[], Any]
    ) -> tuple[list[C.Heap], C.nvshmem.Wanted]:
        """Take memory for this rank's heap at the same place on all ranks, and find theirs. Collective among them.

        Parameters
        ----------
        bootstrap : Bootstrap
            The ranks.
        size
            Bytes of a heap.
        cleared
            How many of them, from the first, are zero before any peer can reach them.
        by_nics
            Whether NICs join some ranks, for which queue pairs are needed.
        make_copy : callable
            Makes memory for a copy of the first bytes of a heap that is not mapped here.

        Returns
        -------
        heaps : list of native.C.Heap
            By rank.
        wanted : native.C.nvshmem.Wanted
            What queue pairs and keys go with them.

        Raises
        ------
        NvshmemError
            On all ranks: NVSHMEM has no room, or no more queue pairs, or another GPU's memory.
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
                    f"NVSHMEM was initialised with another GPU than this Buffer's, cuda:{self.job.context.ordinal}: "
                    "expected torch.cuda.set_device with the Buffer's GPU before NVSHMEM is initialised"
                )
            part.lease = C.nvshmem.lease(self.job.context, address, size, cleared)
            return offset

        # No rank stores into another's heap before that is clear.
        _check_places(on_all(bootstrap, clear))
        own = part.lease.take()
        heaps = [
            own if rank == self._rank else self._heap_of(address, size, pe) if self._is_near(rank) else make_copy()
            for rank, pe in enumerate(self.job.pes)
        ]
        on_all(bootstrap, self._read_states)  # with the keys of what was allocated
        return heaps, self._wanted([], offset, size)

    def leave(self) -> None:
        """Say that the Buffer has ended well, or never began: its part may be taken again once no output lies there."""
        if self._part is not None:
            self._part.left = True
            if self._part.lease is not None:
                self._part.lease.take()  # what no Buffer has come to use

    def _heap_of(self, address: int, size: int, pe: int) -> C.Heap:
        mapped = self.job.library.mapped(address, pe)
        return C.nvshmem.lease(self.job.context, mapped, size, 0).take()

    def _wanted(self, reached: list[bool], offset: int = 0, size: int = 0) -> C.nvshmem.Wanted:
        queues = self._part.queues if self._part is not None else None
        shared = self._own and queues is None  # none of one's own have been made yet: then these are looked at
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
    """Of a Buffer's memory in the heaps of its ranks."""
    if len({*offsets}) > 1:
        raise NvshmemError(
            f"NVSHMEM: this Buffer's memory begins at bytes {[*offsets]} of the ranks' heaps; expected the same place "
            "on all: each PE makes Buffers, and allocates, in the same order, by one thread at a time"
        )
