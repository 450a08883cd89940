"""Runs on 2 processes: rank 0's program ends while a daemon thread is inside a call that waits for rank 1."""

from __future__ import annotations

import threading
import time

import torch.distributed as dist

import deep_ep_py as deep_ep
from cases import Case
from harness import Trial, dispatch_arguments

TRIAL = Trial.of(Case("exit", 2, 20, hidden=64, topk=2, experts=4))


def call_twice(buffer: deep_ep.Buffer) -> None:
    for _ in range(2):
        try:
            buffer.dispatch(**dispatch_arguments(TRIAL.work, buffer.rank))
        except deep_ep.DeepEPError as error:
            print(error, flush=True)


def main() -> None:
    dist.init_process_group("gloo")
    buffer = deep_ep.Buffer(dist.group.WORLD, num_nvl_bytes=1 << 20, timeout=0.3)
    if buffer.rank == 0:
        threading.Thread(target=call_twice, args=(buffer,), daemon=True).start()
        time.sleep(0.1)
    else:
        time.sleep(1.0)


if __name__ == "__main__":
    main()
