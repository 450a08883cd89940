"""Runs on 2 processes whose programs end while another thread makes calls.

daemon: it is inside a call that waits for rank 1. joined: it is no daemon, so Python lets it end.
"""

from __future__ import annotations

import sys
import threading
import time

import torch.distributed as dist

import deep_ep_py as deep_ep
from cases import Case
from harness import Trial, dispatch_arguments

TRIAL = Trial.of(Case("exit", 2, 20, hidden=64, topk=2, experts=4))


def call_twice(buffer: deep_ep.Buffer) -> None:
    for call in range(2):
        try:
            buffer.dispatch(**dispatch_arguments(TRIAL.work, buffer.rank))
            print(f"call {call} is right", flush=True)
        except deep_ep.DeepEPError as error:
            print(error, flush=True)
        time.sleep(0.2)


def main() -> None:
    dist.init_process_group("gloo")
    daemon = sys.argv[1] == "daemon"
    buffer = deep_ep.Buffer(dist.group.WORLD, num_nvl_bytes=1 << 20, timeout=0.3 if daemon else 20.0)
    if buffer.rank == 0 or not daemon:
        threading.Thread(target=call_twice, args=(buffer,), daemon=daemon).start()
        time.sleep(0.1)
    else:
        time.sleep(1.0)


if __name__ == "__main__":
    main()
