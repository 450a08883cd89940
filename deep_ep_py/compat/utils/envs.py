"""Stand-in for `deep_ep.utils.envs`: joins processes in a group, and seeds their random numbers."""

from __future__ import annotations

import os
import random
from typing import Any

import torch
import torch.distributed as dist

from deep_ep_py import get_logical_domain_size, get_physical_domain_size

__all__ = [
    "dist_print",
    "get_global_seed",
    "get_local_seed",
    "get_logical_domain_size",
    "get_physical_domain_size",
    "init_dist",
    "init_seed",
]

_local_rank: int | None = None
_global_seed = 0
_local_seed = 0


def init_dist(local_rank: int, num_local_ranks: int, seed: int = 0) -> tuple[int, int, Any]:
    """Join the default process group, and make bfloat16 and this process's GPU torch's defaults.

    The rendezvous is configured by environment variables (defaults in parentheses): MASTER_ADDR (127.0.0.1),
    MASTER_PORT (8361), WORLD_SIZE, the number of machines (1), and RANK, the index of this machine (0). The backend is
    NCCL if torch has a GPU; otherwise it is Gloo, and tensors stay on the CPU.

    Parameters
    ----------
    local_rank : int
        Index of this process on its machine.
    num_local_ranks : int
        Number of processes on each machine.
    seed : int
        As in `init_seed`.

    Returns
    -------
    rank, num_ranks : int
        Among the processes of all machines.
    group : torch.distributed.ProcessGroup
        A new group of all of them.
    """
    address, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), os.environ.get("MASTER_PORT", "8361")
    machines, machine = (int(os.environ.get(name, value)) for name, value in (("WORLD_SIZE", "1"), ("RANK", "0")))
    ranks = machines * num_local_ranks
    options: dict[str, Any] = {"backend": "gloo"}
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank)
        torch.set_default_device("cuda")
        options = {"backend": "nccl", "device_id": torch.device("cuda", local_rank)}
    torch.set_default_dtype(torch.bfloat16)
    dist.init_process_group(
        init_method=f"tcp://{address}:{port}", world_size=ranks, rank=machine * num_local_ranks + local_rank, **options
    )
    global _local_rank
    _local_rank = local_rank
    init_seed(seed)
    return dist.get_rank(), dist.get_world_size(), dist.new_group(list(range(ranks)))


def init_seed(global_seed: int) -> None:
    """Seed torch's and Python's random numbers with the given seed plus the rank in the default group."""
    global _global_seed, _local_seed
    _global_seed, _local_seed = global_seed, global_seed + dist.get_rank()
    torch.manual_seed(_local_seed)
    random.seed(_local_seed)


def get_global_seed() -> int:
    """Return the seed that `init_seed` was last called with in this process, 0 at first."""
    return _global_seed


def get_local_seed() -> int:
    """Return the seed of this process: the global one plus its rank; 0 before the first call of `init_seed`."""
    return _local_seed


def dist_print(s: str = "", once_in_node: bool = False) -> None:
    """Print a line, then wait for the other processes of the default group. Collective.

    Parameters
    ----------
    s : str
        The line.
    once_in_node : bool
        Print only in the process with local rank 0, as `init_dist` was told it.

    Raises
    ------
    RuntimeError
        `init_dist` has not been called in this process.
    """
    if _local_rank is None:
        raise RuntimeError("dist_print: expected init_dist to be called before, which tells it the local rank")
    if _local_rank == 0 or not once_in_node:
        print(s, flush=True)
    dist.barrier()
