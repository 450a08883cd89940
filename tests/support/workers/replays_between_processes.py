"""Runs under torchrun, over the stand-in for the driver: graph replays between processes, and a recovery.

A replay is not a call of this library's host code: the proxy finds the commands of its kernels by itself.
"""

from __future__ import annotations

import argparse

import torch.distributed as dist

import pretend_gpu
from cases import Case
from graphs import Captured
from harness import Trial, make_buffer, round_trip

SEEDS = (1, 2, 3)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fabric", required=True)
    options = parser.parse_args()
    pretend_gpu.install(compile_kernels=False)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    case = Case("replayed", ranks, tuple(9 + 4 * r for r in range(ranks)), hidden=64, topk=2, experts=2 * ranks)
    trials = [Trial.of(case, seed) for seed in SEEDS]
    with make_buffer(dist.group.WORLD, case, options.fabric, device="cuda", timeout=20.0) as buffer:
        graph = pretend_gpu.Graph()
        captured = Captured(buffer, trials, graph.capture, graph.replay)
        # Often enough that the initial bank of words is reused.
        for _ in range(3):
            for trial in trials:
                captured.replay(trial)
                buffer.check()
                round_trip(buffer, rank, trial, blocks=2)
            dist.barrier()
            buffer.abort()
            buffer.recover()
        captured.replay(trials[0])
        buffer.check()
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
