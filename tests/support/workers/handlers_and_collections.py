"""Ranks as processes: a signal handler uses a Buffer during a wait; a Buffer in a reference cycle is collected."""

from __future__ import annotations

import gc
import signal
import time
from typing import Any

import torch

import deep_ep_py as deep_ep
from cases import Case
from forked_ranks import Hub, run_scenarios
from harness import Trial, dispatch_arguments, make_buffer

TRIAL = Trial.of(Case("handlers", 2, 24, hidden=64, topk=2, experts=4, arena_bytes=1 << 20))
LATE_SECONDS = 1.0


def a_handler_waits(hub: Hub) -> None:
    """Rank 0's wait is interrupted by a handler that waits too; rank 1 arrives later."""
    buffer = make_buffer(None, TRIAL.case, "peer", comm=hub, timeout=10.0)
    if hub.rank == 0:
        seen = []

        def handler(*_: Any) -> None:
            seen.append(buffer.get_dispatch_layout(TRIAL.work.topk_idx[0], TRIAL.work.num_experts)[0])

        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, LATE_SECONDS / 4)
    else:
        time.sleep(LATE_SECONDS)
    arguments = dispatch_arguments(TRIAL.work, hub.rank)
    TRIAL.check_dispatch(hub.rank, buffer.dispatch(**arguments))
    if hub.rank == 0:
        assert len(seen) == 1 and seen[0].equal(arguments["num_tokens_per_rank"])
    hub.tell("ended")


def a_handler_waits_in_a_recovery(hub: Hub) -> None:
    """The same where the wait is a meeting of a recovery, and the handler's wait is long for rank 1, too."""
    buffer, other = (make_buffer(None, TRIAL.case, "peer", comm=hub, timeout=10.0) for _ in range(2))
    arguments = dispatch_arguments(TRIAL.work, hub.rank)
    seen = []

    def handler(*_: Any) -> None:
        seen.append(other.dispatch(**arguments))

    if hub.rank == 0:
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, LATE_SECONDS / 4)
    else:
        time.sleep(LATE_SECONDS)
        handler()
    buffer.recover()
    TRIAL.check_dispatch(hub.rank, seen[0])
    TRIAL.check_dispatch(hub.rank, buffer.dispatch(**arguments))
    hub.tell("ended")


def a_collected_buffer(hub: Hub) -> None:
    """Rank 1 drops a Buffer in a cycle with a call in flight. Rank 0 arrives later, and finds everything it needs."""
    buffer = make_buffer(None, TRIAL.case, "peer", comm=hub, timeout=10.0)
    handle = buffer.dispatch(**dispatch_arguments(TRIAL.work, hub.rank))[4]
    hub.allgather(None)
    if hub.rank == 1:
        gc.disable()
        event = buffer.dispatch(TRIAL.work.x[1], handle=handle, async_finish=True)
        cycle: dict[str, Any] = {"buffer": buffer}
        cycle["itself"] = cycle
        del event, handle, buffer, cycle
        gc.collect()
    else:
        time.sleep(LATE_SECONDS)
        TRIAL.check_cached(0, buffer.dispatch(TRIAL.work.x[0], handle=handle))
    hub.tell("ended")


def main() -> None:
    torch.set_num_threads(1)
    assert deep_ep.__version__  # imported before the ranks are forked
    run_scenarios(2, a_handler_waits, a_handler_waits_in_a_recovery, a_collected_buffer)


if __name__ == "__main__":
    main()
