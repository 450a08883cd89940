"""Runs under torchrun: decode layers whose micro-batches two threads drive in turn, and one that is compiled."""

from __future__ import annotations

import argparse
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch import Tensor

from decode import check_close, dense, make_layer, routed
from deep_ep_py import moe
from low_latency import BF16, CASTS, Sizes, Work, make_buffer


def in_turns(layer: moe.DecodeLayer, batches: list[tuple[Tensor, ...]]) -> list[Tensor]:
    """Have each thread begin and compute its own micro-batch, and receive for the other's."""
    with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second:
        own, others = (first, second), (second, first)
        begun = [thread.submit(layer.begin, *batch).result() for thread, batch in zip(own, batches)]
        for mine, other, batch in zip(own, others, begun):
            other.submit(batch.receive).result()
            mine.submit(batch.run_experts).result()
        return [other.submit(batch.finish).result() for other, batch in zip(others, begun)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("backend")
    backend = parser.parse_args().backend

    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    sizes = Sizes("processes", ranks, tuple(7 + 3 * source for source in range(ranks)), 16, 128, 3, 4 * ranks)
    both = [Work.of(sizes, seed, results=False) for seed in (1, 2)]
    with make_buffer(dist.group.WORLD, sizes, "peer") as buffer:
        for cast, zero_copy in ((BF16, False), (BF16, True), (CASTS["fp8"], True)):
            layer = make_layer(buffer, sizes, cast, zero_copy)
            for work, out in zip(both, in_turns(layer, [routed(work, rank) for work in both])):
                check_close(out, *dense(work, rank, cast), 0.0079)

        layer = make_layer(buffer, sizes)
        compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=backend)
        for work in both:
            check_close(compiled(*routed(work, rank)), *dense(work, rank), 0.0079)
    print(f"rank {rank} is done")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
