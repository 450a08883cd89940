"""The NVSHMEM job whose PEs are the ranks of a Buffer; the program or a Buffer has initialized it."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from deep_ep_py.base.native import C
from deep_ep_py.transport.bootstrap.groups import Bootstrap
from deep_ep_py.transport.nvshmem.library import Library, NvshmemError, library
from deep_ep_py.transport.nvshmem.pool import Pool, pool
from deep_ep_py.transport.nvshmem.settings import DEFAULTS, RELAXED_ORDERING, set_default, take_back
from deep_ep_py.transport.nvshmem.together import on_all


@dataclass(frozen=True)
class Job:
    """The NVSHMEM job as seen by a rank of a Buffer.

    Attributes
    ----------
    library : Library
        The library, initialized with the rank's GPU.
    context : native.C.cuda.Context
        The context of that GPU.
    pes : tuple of int
        The PE of each rank, by rank.
    all_pes : int
        Number of PEs, including those that are not ranks.
    queues : int
        Queue pairs to each peer that its Buffers want.
    pool : Pool
        The pool of symmetric memory.
    """

    library: Library
    context: Any
    pes: tuple[int, ...]
    all_pes: int
    queues: int
    pool: Pool

    @property
    def is_whole(self) -> bool:
        """Whether all PEs are ranks, so that the ranks may allocate."""
        return len(self.pes) == self.all_pes

    @property
    def has_own_queues(self) -> bool:
        """Whether queue pairs can be created that only their owner posts to."""
        return _makes_queues(self.library)


def join(bootstrap: Bootstrap, context: Any, queues: int) -> Job:
    """Join this process's NVSHMEM job, or initialize NVSHMEM among the ranks if there is none. Collective among them.

    Parameters
    ----------
    bootstrap : Bootstrap
        The ranks.
    context : native.C.cuda.Context
        The context of this rank's GPU.
    queues
        Queue pairs wanted to each peer, if they are created here.

    Raises
    ------
    NvshmemError
        A rank has failed. Raised on all ranks; the message names the one that has failed.
    """
    found = on_all(bootstrap, lambda: _found(bootstrap, context))
    wanted = bootstrap.all_gather(queues)
    if len({*wanted}) > 1:
        raise NvshmemError(f"num_qps_per_rank: expected the same on all ranks, there are {wanted}")
    releases = {tuple(release) for release, *_ in found}
    if len(releases) > 1:
        raise NvshmemError(f"NVSHMEM: expected one version on all ranks, there are {sorted(releases)}")
    there = [rank for rank, (_, status, *_) in enumerate(found) if status]
    if there and len(there) < bootstrap.size:
        missing = min({*range(bootstrap.size)} - {*there})
        raise NvshmemError(
            f"NVSHMEM: rank {there[0]}'s process has initialized it, rank {missing}'s has not; expected all or none"
        )
    if not there:
        for name, value in DEFAULTS.items():
            set_default(name, value)
        if not _makes_queues(library()):  # otherwise Buffers create their own
            set_default("NVSHMEM_IBGDA_NUM_RC_PER_PE", str(max(1, queues)))
        try:
            unique = on_all(bootstrap, lambda: library().unique_id().hex() if bootstrap.rank == 0 else "")[0]
            found = on_all(bootstrap, lambda: _initialize(bytes.fromhex(unique), bootstrap, context))
        except BaseException:
            take_back()
            raise
    if len({job for *_, job in found}) > 1:
        raise NvshmemError(
            "NVSHMEM: different Buffers have initialized it for different ones of these ranks; expected all to be PEs "
            "of one job: give the first Buffer, or deep_ep_py.nvshmem.reserve, all ranks"
        )
    pes = tuple(int(pe) for _, _, pe, *_ in found)
    job = Job(library(), context, pes, int(found[0][3]), queues, pool())
    if len(set(pes)) < len(pes):
        raise NvshmemError(f"NVSHMEM: ranks are PEs {[*pes]}; expected all different")
    if any(status < C.nvshmem.INITIALIZED for _, status, *_ in found):
        set_default(RELAXED_ORDERING, DEFAULTS[RELAXED_ORDERING])  # it is read when NVSHMEM takes the GPU
        on_all(bootstrap, lambda: _give_it_a_device(job))
    return job


def _makes_queues(loaded: Library) -> bool:
    return loaded.version >= C.nvshmem.QUEUE_PAIRS_OF_ONES_OWN_SINCE


def _found(bootstrap: Bootstrap, context: Any) -> list[Any]:
    """Return the state of NVSHMEM in this process.

    The items are the library's version, how far it is initialized, its PE, the number of PEs, and the name of the job
    if a Buffer has initialized it.
    """
    if bootstrap.in_process:
        raise NvshmemError("heap='nvshmem': expected one process per rank, because NVSHMEM's PEs are processes")
    loaded = library()
    with context.current():
        status = loaded.status()
        return [[*loaded.release], status, *((loaded.pe(), loaded.pes(), pool().job) if status else (0, 0, ""))]


def _initialize(unique: bytes, bootstrap: Bootstrap, context: Any) -> list[Any]:
    with context.current():
        library().initialize(unique, bootstrap.rank, bootstrap.size)
    pool().begin(sha256(unique).hexdigest())
    return _found(bootstrap, context)


def _give_it_a_device(job: Job) -> None:
    """Make an NVSHMEM that was initialized without a GPU take the current one."""
    if not job.is_whole:
        raise NvshmemError(
            f"NVSHMEM was initialized without a GPU, and only {len(job.pes)} of its {job.all_pes} PEs are ranks: "
            "expected torch.cuda.set_device before it is initialized"
        )
    with job.context.current():
        job.library.take_device()
        if job.library.status() < C.nvshmem.INITIALIZED:
            raise NvshmemError(
                f"NVSHMEM {job.library} takes no GPU: expected one that its driver serves; NVSHMEM_DEBUG=INFO says more"
            )
