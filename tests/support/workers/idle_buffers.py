"""Runs under torchrun: the cost of an idle Buffer to its process, for each libfabric provider named.

Rank 0 prints a line of JSON for each, with figures by rank: `shares` of a core, `wakes` per second, and the seconds of
a dispatch and combine: `after` for the first after the idle period, `hot` for the ones that follow.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import sys
import time
from typing import Any

import torch.distributed as dist

import deep_ep_py as deep_ep
from cases import Case
from deep_ep_py.base.environment import PROVIDER
from harness import Trial, make_buffer, round_trip

MEASURED = 2.0
UNTIL_ASLEEP = 1.6
HOT = 5


def cost() -> tuple[float, float]:
    """Return the share of a core, and how often per second a thread goes to sleep, while the main thread is idle."""
    began, used, slept = time.monotonic(), time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
    time.sleep(MEASURED)
    seconds = time.monotonic() - began
    sleeps = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - slept
    return (time.process_time() - used) / seconds, sleeps / seconds


def timed(buffer: deep_ep.Buffer, trial: Trial) -> float:
    dist.barrier()
    began = time.perf_counter()
    round_trip(buffer, buffer.rank, trial, 2)
    return time.perf_counter() - began


def measure(trial: Trial, before: tuple[float, float]) -> Any:
    buffer = make_buffer(dist.group.WORLD, trial.case, "proxy")
    timed(buffer, trial)
    time.sleep(UNTIL_ASLEEP)
    share, wakes = (now - then for now, then in zip(cost(), before, strict=True))
    after = timed(buffer, trial)
    hot = statistics.median(timed(buffer, trial) for _ in range(HOT))
    buffer.destroy()
    return share, wakes, after, hot


def main() -> None:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    trial = Trial.of(Case("idle", ranks, 16, hidden=64, topk=2, experts=2 * ranks))
    before = cost()  # of torch's own threads
    for provider in sys.argv[1:]:
        os.environ[PROVIDER] = provider
        found: list[Any] = [None] * ranks
        dist.all_gather_object(found, measure(trial, before))
        if rank == 0:
            figures = dict(zip(("shares", "wakes", "after", "hot"), zip(*found, strict=True), strict=True))
            print(json.dumps({"provider": provider, **figures}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
