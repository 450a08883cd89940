"""Ranks started by torchrun, each with a GPU of its own."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from deep_ep_py.tools.bench.gpu_nodes import machines, torchrun_variable
from deep_ep_py.tools.bench.rank_process import be_killed_with_parent
from deep_ep_py.transport.bootstrap.groups import make_bootstrap


def require_gpu() -> None:
    """Check that torch sees a GPU.

    Raises
    ------
    ValueError
        It does not; the message says why.
    """
    if torch.cuda.is_available():
        return
    why = "" if torch.backends.cuda.is_built() else f": torch {torch.__version__} is built without CUDA"
    raise ValueError(f"torch sees no GPU here{why}")


def choose_gpu(local_rank: int, local_ranks: int, gpus: int) -> int:
    """Return the index of a rank's own GPU among those that it sees.

    Parameters
    ----------
    local_rank, local_ranks
        The index of this rank on its machine, and the number of ranks there.
    gpus
        Number of GPUs that this rank sees. A single one may be its own, through `CUDA_VISIBLE_DEVICES`; `gpu_per_rank`
        checks that.

    Raises
    ------
    ValueError
        There are too few GPUs.
    """
    if gpus >= local_ranks:
        return local_rank
    if gpus == 1:
        return 0
    raise ValueError(f"{local_ranks} ranks on this machine: expected a GPU for each, torch sees {gpus}")


@contextmanager
def gpu_per_rank() -> Iterator[dist.ProcessGroup]:
    """Make this rank's GPU current, and create a process group of all ranks, used only to exchange objects.

    Yields
    ------
    torch.distributed.ProcessGroup
        Over gloo, or over NCCL if torch has no gloo.

    Raises
    ------
    ValueError
        There are fewer GPUs than ranks, or machines have different numbers of ranks.
    """
    require_gpu()
    several = machines() > 1
    rank, ranks, local_rank, local_ranks = map(
        torchrun_variable, ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    )
    torch.cuda.set_device(choose_gpu(local_rank, local_ranks, torch.cuda.device_count()))
    be_killed_with_parent()
    if not several:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo" if dist.is_gloo_available() else "nccl", rank=rank, world_size=ranks)
    try:
        group = dist.group.WORLD
        assert group is not None
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        _require_distinct(make_bootstrap(group).all_gather(str(properties.uuid)))
        yield group
    finally:
        # A group kept alive only by a reference cycle would die with the interpreter and abort the process.
        gc.collect()
        dist.destroy_process_group()


def _require_distinct(uuids: list[str]) -> None:
    gpus = len(set(uuids))
    if gpus < len(uuids):
        raise ValueError(f"{len(uuids)} ranks: expected a GPU for each, they have {gpus} among them")
