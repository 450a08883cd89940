"""Ranks that torchrun has started, each with a GPU of its own."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from deep_ep_py.bench.gpu_nodes import machines, torchrun_variable
from deep_ep_py.bench.rank_process import be_killed_with_parent
from deep_ep_py.bootstrap.groups import make_bootstrap


def require_gpu() -> None:
    """Check that torch sees a GPU.

    Raises
    ------
    ValueError
        It does not, and why.
    """
    if torch.cuda.is_available():
        return
    why = "" if torch.backends.cuda.is_built() else f": torch {torch.__version__} is built without CUDA"
    raise ValueError(f"torch sees no GPU here{why}")


def choose_gpu(local_rank: int, local_ranks: int, gpus: int) -> int:
    """Return which of the GPUs that a rank sees is its own.

    Parameters
    ----------
    local_rank, local_ranks
        This rank among those of its machine, and how many these are.
    gpus
        That this rank sees. A single one may be its own, by `CUDA_VISIBLE_DEVICES`: whether it is, `gpu_per_rank`
        finds out.

    Raises
    ------
    ValueError
        They are too few.
    """
    if gpus >= local_ranks:
        return local_rank
    if gpus == 1:
        return 0
    raise ValueError(f"{local_ranks} ranks on this machine: expected a GPU for each, torch sees {gpus}")


@contextmanager
def gpu_per_rank() -> Iterator[dist.ProcessGroup]:
    """Make this rank's GPU the current one, and a process group of all ranks, which exchanges objects alone.

    Yields
    ------
    torch.distributed.ProcessGroup
        Over gloo, or over NCCL where torch has no gloo.

    Raises
    ------
    ValueError
        There are fewer GPUs than ranks, or not as many ranks on each machine.
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
        # A group that only a reference cycle still holds would die with the interpreter, and abort the process.
        gc.collect()
        dist.destroy_process_group()


def _require_distinct(uuids: list[str]) -> None:
    gpus = len(set(uuids))
    if gpus < len(uuids):
        raise ValueError(f"{len(uuids)} ranks: expected a GPU for each, they have {gpus} among them")
