"""Ranks as processes: an interrupt ends a wait at once, whatever else this process waits for at the time."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import deep_ep_py as deep_ep
from cases import Case
from forked_ranks import Hub, run_scenarios
from harness import Trial, dispatch_arguments, make_buffer

TRIAL = Trial.of(Case("interrupts", 2, 24, hidden=64, topk=2, experts=4, arena_bytes=1 << 20))
TIMEOUT = 10.0
AFTER = 0.5  # s
PROMPTLY = 2.0  # s


def interrupted(call: Callable[[], Any]) -> None:
    """Run a long call on the main thread, and interrupt it."""
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, AFTER)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        call()
    lasted = time.monotonic() - began
    assert lasted < AFTER + PROMPTLY, f"the interrupt ended the wait after {lasted:.1f} s"


def two_buffers(hub: Hub) -> tuple[deep_ep.Buffer, deep_ep.Buffer]:
    first, second = (make_buffer(None, TRIAL.case, "peer", comm=hub, timeout=TIMEOUT) for _ in range(2))
    return first, second


def on_its_way(buffer: deep_ep.Buffer, hub: Hub) -> Any:
    arguments = dispatch_arguments(TRIAL.work, hub.rank, num_worst_tokens=TRIAL.max_rows)
    return buffer.dispatch(**arguments, async_finish=True)


def beside_short_calls(hub: Hub) -> None:
    """Another thread of rank 0 makes short calls, which do not check for signals: only the main thread does."""
    waits, busy = two_buffers(hub)
    if hub.rank == 0:
        stop = threading.Event()

        def make_short_calls() -> None:
            while not stop.is_set():
                busy.get_dispatch_layout(TRIAL.work.topk_idx[0], TRIAL.work.num_experts)

        thread = threading.Thread(target=make_short_calls)
        thread.start()
        try:
            interrupted(lambda: waits.dispatch(**dispatch_arguments(TRIAL.work, 0)))
        finally:
            stop.set()
            thread.join()
    hub.allgather(None)
    hub.tell("ended")


def behind_another_buffers_call(hub: Hub) -> None:
    """A thread of the extension runs the kernels of both Buffers; the main thread only sleeps."""
    first, second = two_buffers(hub)
    if hub.rank == 0:
        results = on_its_way(first, hub)
        time.sleep(AFTER)  # it runs the kernels from now on
        interrupted(lambda: second.dispatch(**dispatch_arguments(TRIAL.work, 0)))
        first.abort()
        del results
    hub.allgather(None)
    hub.tell("ended")


def in_destroy(hub: Hub) -> None:
    """Interrupt destroying a Buffer with a call in flight that no peer joins. The peers are notified."""
    buffer, _ = two_buffers(hub)
    if hub.rank == 0:
        results = on_its_way(buffer, hub)
        interrupted(buffer.destroy)
        del results
    hub.allgather(None)
    if hub.rank == 1:
        with pytest.raises(deep_ep.DeepEPError, match="rank 0"):
            buffer.dispatch(**dispatch_arguments(TRIAL.work, 1))
    hub.allgather(None)
    hub.tell("ended")


def main() -> None:
    torch.set_num_threads(1)
    run_scenarios(2, beside_short_calls, behind_another_buffers_call, in_destroy)


if __name__ == "__main__":
    main()
