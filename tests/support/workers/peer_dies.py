"""Runs under torchrun: the last rank's process ends halfway; the others must raise at once, not hang, and name that
rank."""

from __future__ import annotations

import os
import sys
import time

import torch.distributed as dist

import deep_ep_py as deep_ep
from cases import Case
from harness import Trial, dispatch_arguments, make_buffer


def main() -> None:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    case = Case("dies", ranks, 12, hidden=64, topk=2, experts=2 * ranks)
    trial = Trial.of(case)
    buffer = make_buffer(dist.group.WORLD, case, "peer")
    trial.check_dispatch(rank, buffer.dispatch(**dispatch_arguments(trial.work, rank)))
    dist.barrier()
    if rank == ranks - 1:
        os._exit(0)
    began = time.monotonic()
    try:
        buffer.dispatch(**dispatch_arguments(trial.work, rank))
    except deep_ep.DeepEPError as error:
        if time.monotonic() - began > 20.0:  # generous, for a loaded machine, and far below the Buffer's timeout
            sys.exit(f"noticed after {time.monotonic() - began:.1f} s")
        print(f"rank {rank} raised {type(error).__name__}: {error}", flush=True)
    else:
        sys.exit("a dispatch without the last rank has returned")
    os._exit(0)


if __name__ == "__main__":
    main()
