"""Runs under torchrun, over the stand-ins for the driver and for NVSHMEM: both modes in NVSHMEM's heap, with rows
between nodes over its queue pairs, checked against the oracle.
"""

from __future__ import annotations

import argparse
import ctypes
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch.distributed as dist

import deep_ep_py as deep_ep
import low_latency
import pretend_gpu
from cases import Case
from deep_ep_py.transport.nvshmem.library import NAME
from deep_ep_py.transport.nvshmem.pool import pool
from harness import Trial, dispatch_arguments, round_trip

QUEUES = 3


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks-per-node", type=int, action="append", required=True)
    parser.add_argument("--foreign", action="store_true", help="NVSHMEM posts between the Buffers' requests")
    options = parser.parse_args()
    pretend()
    dist.init_process_group("gloo")
    for per_node in options.ranks_per_node:
        with posting() if options.foreign else nullcontext():
            assert ("ibgda" in normal(per_node)) == (per_node < dist.get_world_size())
            low_latency_calls(per_node)
        dist.barrier()
    dist.destroy_process_group()


def pretend() -> None:
    """Set up a pretend GPU, whose driver NVRTC must not find: the probe was compiled elsewhere."""
    pretend_gpu.install(compile_kernels=False)
    pretend_gpu.take_compiled_probe()


def make_buffer(per_node: int, **options: Any) -> deep_ep.Buffer:
    return deep_ep.Buffer(dist.group.WORLD, ranks_per_node=per_node, num_qps_per_rank=QUEUES, timeout=60.0, **options)


def normal(per_node: int, heap: str = "nvshmem", hops: int | None = None) -> tuple[str, ...]:
    """Check normal mode, with the given number of hops. Returns the path to each rank."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    tokens = tuple(10 + 7 * one for one in range(ranks))
    case = Case("nvshmem", ranks, tokens, hidden=264, topk=4, experts=4 * ranks, ranks_per_node=per_node, hops=hops)
    trials = [Trial.of(case, seed) for seed in (1, 2, 3)]
    with make_buffer(per_node, heap=heap, num_nvl_bytes=1 << 20, arena_bytes=4 << 20) as buffer:
        kept = []
        for turn, blocks in enumerate((1, 2, 5, 2)):
            trial = trials[turn % 3]
            round_trip(buffer, rank, trial, blocks)
            kept.append((trial, buffer.dispatch(**dispatch_arguments(trial.work, rank))))
        for trial, results in kept:
            trial.check_dispatch(rank, results)
        assert buffer.stats()["through_host"] == (heap == "own")
        return buffer.paths


def low_latency_calls(per_node: int, heap: str = "nvshmem") -> None:
    ranks = dist.get_world_size()
    tokens = tuple(10 + 7 * rank for rank in range(ranks))
    sizes = low_latency.Sizes("nvshmem", ranks, tokens, max(tokens), 256, 4, 4 * ranks)
    both = [low_latency.Work.of(sizes, seed) for seed in (1, 2)]
    with make_buffer(per_node, heap=heap, num_rdma_bytes=4 << 20, low_latency_mode=True, arena_bytes=1 << 20) as buffer:
        for cast in low_latency.CASTS.values():
            for work in both:
                low_latency.round_trip(buffer, work, cast, hooks=work is both[1])


@contextmanager
def posting() -> Iterator[None]:
    """Post to NVSHMEM's queue pairs from another thread during the body, as NVSHMEM's kernels do."""
    over, failed, posted = threading.Event(), list[int](), list[int]()

    def post() -> None:
        library = ctypes.CDLL(NAME)
        while not over.is_set():
            # Until then the Buffer sets variables of the environment, which the stand-in's calls read.
            if not pool().job or library.nvshmemx_init_status() < 2:
                time.sleep(0.001)
                continue
            if status := library.nvshmem_double_foreign_posts(3):
                failed.append(status)
                return
            posted.append(3)

    thread = threading.Thread(target=post)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    assert posted and not failed, failed


if __name__ == "__main__":
    main()
