"""Runs under torchrun: dispatch and combine between two nodes, whose timeline DEEP_EP_TRACE records; one rank is late
for the last dispatch."""

from __future__ import annotations

import argparse
import time

import torch.distributed as dist

from cases import Case
from harness import Trial, make_buffer, round_trip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--late", type=int, default=-1, help="the rank that is late")
    parser.add_argument("--seconds", type=float, default=0.3, help="how late")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    case = Case(
        "traced",
        ranks,
        options.tokens,
        options.hidden,
        4,
        4 * ranks,
        ranks_per_node=max(1, ranks // 2),
        num_nvl_bytes=32 << 20,
    )
    with make_buffer(dist.group.WORLD, case, "ibgda") as buffer:
        for seed in (1, 2):
            dist.barrier()
            if seed == 2 and rank == options.late:
                time.sleep(options.seconds)
            round_trip(buffer, rank, Trial.of(case, seed), 2)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
