"""Runs under torchrun: a few layers' dispatch and combine between processes, checked against the oracle."""

from __future__ import annotations

import argparse
import gc
import os
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

import deep_ep_py as deep_ep
import pretend_gpu
from cases import Case
from deep_ep_py.device.cuda import CudaDevice
from harness import Trial, dispatch_arguments, make_buffer, round_trip

PATHS: dict[str, dict[str, Any]] = {
    "direct": {"fabric": "peer"},
    "rounds": {"fabric": "peer", "arena_bytes": 0},
    "weak": {"fabric": "weak"},
    "ibgda": {"fabric": "ibgda"},
    "two_hops": {"fabric": "ibgda"},
    "two_hops_in_chunks": {"fabric": "weak", "arena_bytes": 0},
    "proxy": {"fabric": "proxy"},
    "proxy_in_two_hops": {"fabric": "proxy"},
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--path", choices=PATHS, action="append", help="may be repeated; default: direct")
    parser.add_argument("--pretend-gpu", action="store_true")
    help_device = "cuda:local: each process has its own; cuda:own: and sees no other"
    parser.add_argument("--device", default="cpu", help=help_device)
    parser.add_argument("--growing", action="store_true", help="the GPU's arena begins nearly empty")
    options = parser.parse_args()
    if options.growing:
        CudaDevice.first_arena_bytes = 0
    if options.pretend_gpu:
        pretend_gpu.install()

    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = {"cuda:local": f"cuda:{rank}", "cuda:own": "cuda:0"}.get(options.device, options.device)
    if options.device == "cuda:own":  # CUDA is not initialized yet
        seen = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(ranks)))).split(",")
        os.environ["CUDA_VISIBLE_DEVICES"] = seen[rank]
    case = Case("processes", ranks, tuple(10 + 7 * r for r in range(ranks)), hidden=264, topk=4, experts=4 * ranks)
    if options.growing:  # rows that the rest of the memory's first granule has no room for, which is 2 MiB on a GPU
        case = replace(case, tokens=tuple(300 + 7 * r for r in range(ranks)), hidden=7168)
    if device != "cpu":
        torch.cuda.set_device(device)
    on_two_nodes = replace(case, ranks_per_node=max(1, ranks // 2), hops=2)
    for path in options.path or ["direct"]:
        routed = on_two_nodes if "two_hops" in path else case
        trials = [Trial.of(routed, seed).on(device) for seed in (1, 2, 3)]
        layers(make_buffer(dist.group.WORLD, routed, **PATHS[path], device=device), trials, device, options.growing)
    dist.destroy_process_group()


def layers(buffer: deep_ep.Buffer, trials: list[Trial], device: str, growing: bool) -> None:
    rank, case = dist.get_rank(), trials[0].case
    assert buffer.rank == rank and buffer.group_size == dist.get_world_size()
    kept = []
    for turn, blocks in enumerate((1, 2, 5, 2)):
        trial = trials[turn % 3]
        round_trip(buffer, rank, trial, blocks)
        given = dispatch_arguments(Trial.of(case, turn % 3 + 1).work, rank)
        kept.append((trial, buffer.dispatch(**{name: value.to(device) for name, value in given.items()})))
    if growing:
        stats = buffer.stats()
        assert stats["rounds"] and stats["direct"] and stats["arena_growths"], stats
    del buffer
    gc.collect()
    # Outputs are in memory that the peers map: it stays valid after this rank's Buffer, and soon its peers, are
    # destroyed.
    for trial, results in kept:
        trial.check_dispatch(rank, results)


if __name__ == "__main__":
    main()
