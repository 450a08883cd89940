"""Runs under torchrun, over the stand-ins for the driver and for NVSHMEM: the GPUs of a machine's odd and even ranks
access each other without native atomics. Both modes, checked against the oracle. MACHINES: their number, from the
environment.

    gpus_over_pcie.py own|nvshmem
"""

from __future__ import annotations

import os
import sys

import torch.distributed as dist
from gpu_per_rank import be_on_machines
from nvshmem_buffers import low_latency_calls, normal, pretend


def main() -> None:
    heap, rank, ranks = sys.argv[1], int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    machine = be_on_machines(int(os.environ.get("MACHINES", "1")))
    near = os.environ["LOCAL_WORLD_SIZE"]
    os.environ.update(DOUBLE_DEVICES=near, DOUBLE_FIRST_GPU=os.environ["LOCAL_RANK"], DOUBLE_HOST=f"host {machine}")
    pretend()
    dist.init_process_group("gloo")
    between = {"own": "proxy", "nvshmem": "ibgda"}[heap]
    peers = [peer for peer in range(ranks) if peer // int(near) == machine and (rank + peer) % 2 == 0]
    routes = tuple("peer" if peer in peers else between for peer in range(ranks))
    assert normal(int(near), heap, hops=1) == routes
    low_latency_calls(int(near), heap)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
