"""NVSHMEM: its symmetric heap for Buffers, and its queue pairs for their kernels. It is not imported before a Buffer or
`reserve` asks for it.
"""

from __future__ import annotations

from typing import Any

from deep_ep_py.base import arguments
from deep_ep_py.base.config import QUEUE_PAIRS

__all__ = ["reserve"]


def reserve(
    group: Any, num_bytes: int, num_qps_per_rank: int = QUEUE_PAIRS, buffers: int = 1, device: str | None = None
) -> None:
    """Reserve symmetric memory and queue pairs for Buffers of a subset of the ranks. Collective among all ranks.

    NVSHMEM allocates on all PEs at once, so a Buffer of only some of them, such as one of several expert-parallel
    groups, takes from what all have reserved. A Buffer of all PEs needs no reservation.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup
        All ranks; if NVSHMEM is already initialized, they must be all of its PEs.
    num_bytes : int
        Size of one Buffer's heap. A Buffer that finds too little memory names the size in its error.
    num_qps_per_rank : int
        The same value that the Buffer will be given.
    buffers : int
        How many such Buffers a rank will have at a time.
    device : torch.device or str, optional
        This rank's GPU. Default: "cuda", the current one.

    Raises
    ------
    TypeError, ValueError
        An argument is invalid; the message names it.
    NvshmemError
        NVSHMEM is not installed, or has no room.
    """
    import torch

    from deep_ep_py.base.native import C
    from deep_ep_py.transport.bootstrap.groups import make_bootstrap
    from deep_ep_py.transport.nvshmem.job import join
    from deep_ep_py.transport.nvshmem.library import NvshmemError
    from deep_ep_py.transport.nvshmem.together import on_all

    arguments.integer("num_bytes", num_bytes, 1, arguments.MAX_BYTES)
    arguments.integer("num_qps_per_rank", num_qps_per_rank, 1, arguments.MAX_ROWS)
    arguments.integer("buffers", buffers, 1, arguments.MAX_RANKS)
    where = arguments.device("cuda" if device is None else device)
    if where.type != "cuda":
        raise ValueError(f"device={device!r}: expected a GPU, because NVSHMEM's memory is GPU memory")
    bootstrap, contexts = make_bootstrap(group), list[Any]()
    arguments.same_on_all_ranks(bootstrap.rank, bootstrap.all_gather({"num_bytes": num_bytes, "buffers": buffers}))

    def find_gpu() -> None:
        if where.index is None and not torch.cuda.is_available():
            raise NvshmemError("device=None: expected a GPU that torch sees; there is none")
        contexts.append(C.cuda.Context(torch.cuda.current_device() if where.index is None else where.index))

    on_all(bootstrap, find_gpu)
    job = join(bootstrap, contexts[0], num_qps_per_rank)
    if not job.is_whole:
        raise NvshmemError(
            f"group: expected all of NVSHMEM's {job.all_pes} PEs, which only allocate together, not {bootstrap.size}"
        )
    with job.context.current():
        for _ in range(buffers):
            job.pool.reserve(bootstrap, job, num_bytes)
            if job.has_own_queues:
                job.pool.make_queues(bootstrap, job, num_qps_per_rank)
