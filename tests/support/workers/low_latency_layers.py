"""Runs under torchrun: low-latency layers between processes, checked against the oracle."""

from __future__ import annotations

import argparse
import threading

import torch
import torch.distributed as dist

import logfmt
import pretend_gpu
from low_latency import (
    BF16,
    CASTS,
    Sizes,
    Work,
    check_combine,
    check_dispatch,
    combine,
    dispatch,
    make_buffer,
    round_trip,
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fabric", action="append")
    parser.add_argument("--pretend-gpu", action="store_true")
    parser.add_argument("--device", default="cpu", help="cuda:local: each process has its own")
    options = parser.parse_args()
    if options.pretend_gpu:
        pretend_gpu.install(compile_kernels=False)
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    device = f"cuda:{dist.get_rank()}" if options.device == "cuda:local" else options.device
    if device != "cpu":
        torch.cuda.set_device(device)
    tokens = tuple(10 + 7 * rank for rank in range(ranks))
    sizes = Sizes("processes", ranks, tokens, max(tokens), 256, 4, 4 * ranks)
    both = [Work.of(sizes, seed) for seed in (1, 2)]
    for fabric in options.fabric:
        with make_buffer(dist.group.WORLD, sizes, fabric, device=device) as buffer:
            for cast in CASTS.values():
                for work in both:
                    round_trip(buffer, work, cast, hooks=work is both[1])
            # As with micro-batches that take turns: the other's thread calls the hook.
            sent = [dispatch(buffer, work, return_recv_hook=True) for work in both]
            for work, results in zip(both, sent, strict=True):
                other = threading.Thread(target=results[4])
                other.start()
                other.join()
                check_dispatch(work, buffer.rank, BF16, results)
            for work, results in zip(both, sent, strict=True):
                combine(buffer, work, results[2], return_recv_hook=True)[2]()
                spread = logfmt.spread(work)
                combined, _, hook = combine(buffer, spread, results[2], use_logfmt=True, return_recv_hook=True)
                hook()
                check_combine(spread, buffer.rank, combined)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
