"""A rank on one of two machines: dispatches and combines until a failure, and reports it in a line of JSON."""

from __future__ import annotations

import argparse
import json
import os
import time
from typing import Any

import torch.distributed as dist

import deep_ep_py as deep_ep
from cases import Case
from harness import Trial, dispatch_arguments, make_buffer


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--timeout", type=float, default=30.0, help="timeout of the Buffer's waits")
    parser.add_argument("--rounds", type=int, default=0, help="rounds before a normal end; 0: until something fails")
    parser.add_argument("--rests", type=float, default=0.0, help="seconds between the last round and the end")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    case = Case(
        "machines",
        ranks,
        40,
        hidden=256,
        topk=2,
        experts=2 * ranks,
        ranks_per_node=ranks // 2,
        hops=2 if ranks > 2 else 1,
    )
    trial = Trial.of(case)
    buffer = make_buffer(dist.group.WORLD, case, None, timeout=options.timeout)
    tell(rank, made=os.getpid())
    done = 0
    try:
        while options.rounds == 0 or done < options.rounds:
            handle = buffer.dispatch(**dispatch_arguments(trial.work, rank))[4]
            trial.check_combine(rank, trial.combine(buffer, rank, handle))
            done += 1
        time.sleep(options.rests)
        began = time.monotonic()
        buffer.destroy()
        tell(rank, ended=True, took=time.monotonic() - began)
    except deep_ep.DeepEPError as error:
        tell(rank, raised=str(error), kind=type(error).__name__, at=time.monotonic())
    # Not through the process group, which would wait for ranks that are cut off.
    os._exit(0)


def tell(rank: int, **what: Any) -> None:
    print(json.dumps({"rank": rank, **what}), flush=True)


if __name__ == "__main__":
    main()
