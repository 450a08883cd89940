"""Stand-in for `deep_ep.utils.envs`: joins processes in a group."""

from __future__ import annotations

import os
import random
from typing import Any

import torch
import torch.distributed as dist


def init_dist(local_rank: int, num_local_ranks: int, seed: int | None = None) -> tuple[int, int, Any]:
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
    seed : int, optional
        Seed of torch's and Python's random numbers; the rank is added to it.

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
    if seed is not None:
        torch.manual_seed(seed + dist.get_rank())
        random.seed(seed + dist.get_rank())
    return dist.get_rank(), dist.get_world_size(), dist.new_group(list(range(ranks)))
