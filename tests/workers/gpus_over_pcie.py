"""Runs under torchrun, over the stand-ins for the driver and for NVSHMEM: the GPUs of odd and even ranks, all on one
machine, reach each other without native atomics. Both modes, checked against the oracle.

    gpus_over_pcie.py own|nvshmem
"""

from __future__ import annotations

import os
import sys

import torch.distributed as dist
from nvshmem_buffers import low_latency_calls, normal, pretend


def main() -> None:
    heap, rank, ranks = sys.argv[1], int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    os.environ.update(DOUBLE_DEVICES=str(ranks), DOUBLE_MACHINE=str(ranks), DOUBLE_FIRST_GPU=str(rank))
    pretend()
    dist.init_process_group("gloo")
    between = {"own": "proxy", "nvshmem": "ibgda"}[heap]
    routes = tuple("peer" if (rank + peer) % 2 == 0 else between for peer in range(ranks))
    assert normal(ranks, heap) == routes
    low_latency_calls(ranks, heap)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
