"""Runs on 2 processes: one thread makes calls, and another destroys the Buffer, leaves it or recovers it meanwhile."""

from __future__ import annotations

import random
import sys
import threading
import time

import torch.distributed as dist

import deep_ep_py as deep_ep
from cases import Case
from harness import Trial, round_trip

RANKS, TIMES, TIMEOUT = 2, 8, 2.0
CASE = Case("ended", RANKS, (50, 70), hidden=64, topk=2, experts=4)
TRIAL = Trial.of(CASE)
HINT = deep_ep.Buffer.get_low_latency_rdma_size_hint(max(CASE.tokens), CASE.hidden, RANKS, CASE.experts)
ENDINGS = {
    "destroy": lambda buffer: buffer.destroy(),
    "exit": lambda buffer: buffer.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None),
    "recover": lambda buffer: buffer.recover(),
}


def make_buffer() -> deep_ep.Buffer:
    return deep_ep.Buffer(dist.group.WORLD, 1 << 20, HINT, low_latency_mode=True, timeout=TIMEOUT)


def receive_by_hook(buffer: deep_ep.Buffer) -> None:
    """A dispatch of low-latency mode, whose kernels are launched by two calls."""
    x, topk_idx = TRIAL.work.x[buffer.rank], TRIAL.work.topk_idx[buffer.rank]
    most, experts = max(CASE.tokens), CASE.experts
    buffer.low_latency_dispatch(x, topk_idx, most, experts, use_fp8=False, return_recv_hook=True)[4]()


def call_until_ended(buffer: deep_ep.Buffer, stop: threading.Event, wrong: list[BaseException]) -> None:
    while not stop.is_set():
        try:
            round_trip(buffer, buffer.rank, TRIAL, 1)
            receive_by_hook(buffer)
        except deep_ep.DeepEPError:  # it was ended
            return
        except BaseException as error:
            if "since the Buffer recovered" not in str(error):  # between a dispatch and its combine
                wrong.append(error)
            return


def end_meanwhile(how: str, delay: float) -> None:
    buffer, stop = make_buffer(), threading.Event()
    wrong: list[BaseException] = []
    caller = threading.Thread(target=call_until_ended, args=(buffer, stop, wrong))
    caller.start()
    time.sleep(delay)
    stop.set()
    try:
        ENDINGS[how](buffer)
    except deep_ep.DeepEPError:  # the other rank's ending came first
        assert how == "destroy"
    caller.join()
    assert not wrong, wrong
    dist.barrier()
    with buffer if how == "recover" else make_buffer() as usable:
        round_trip(usable, usable.rank, TRIAL, 2)
        dist.barrier()


def main() -> None:
    dist.init_process_group("gloo")
    random_ = random.Random(dist.get_rank())
    for how in sys.argv[1:]:
        for _ in range(TIMES):
            end_meanwhile(how, random_.random() * 0.006)
        print(f"ended by {how}\n", end="", flush=True)  # in one write, beside another rank's
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
