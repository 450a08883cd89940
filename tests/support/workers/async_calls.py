"""Runs under torchrun, 3 processes: calls with async_finish make progress while their caller does not."""

from __future__ import annotations

import ctypes
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

import deep_ep_py as deep_ep
from cases import Case
from harness import Trial, dispatch_arguments, make_buffer, round_trip

SLEEP = 3.0
kept_until_the_end: list[Any] = []


def the_others_need_not_wait(buffer: deep_ep.Buffer, trial: Trial, sleep: Callable[[float], Any]) -> None:
    """Rank 0 sleeps with calls in flight; the others' calls, which need its rows, end meanwhile."""
    rank = buffer.rank
    dist.barrier()
    began = time.monotonic()
    results = buffer.dispatch(**dispatch_arguments(trial.work, rank), async_finish=rank == 0)
    combined = trial.combine(buffer, rank, results[4], async_finish=rank == 0)
    if rank == 0:
        assert time.monotonic() - began < SLEEP / 2, "the call waited for its own end"
        sleep(SLEEP)
        for event in (results[5], combined[2]):
            event.current_stream_wait()
            event.current_stream_wait()  # a second time has no effect
    else:
        assert time.monotonic() - began < SLEEP, "rank 0's kernels made no progress while it slept"
    trial.check_dispatch(rank, results)
    trial.check_combine(rank, combined)


def holding_the_gil(seconds: float) -> None:
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


def one_that_waits_while_another_holds_the_gil(buffer: deep_ep.Buffer, trial: Trial) -> None:
    """Rank 0 waits in a call while another of its threads holds the GIL: the others' calls, which need its rows,
    end."""
    rank = buffer.rank
    handle = buffer.dispatch(**dispatch_arguments(trial.work, rank))[4]
    dist.barrier()
    if rank == 0:
        holder = threading.Timer(0.3, holding_the_gil, [SLEEP])
        holder.start()
    else:
        time.sleep(1.0)
    began = time.monotonic()
    trial.check_combine(rank, trial.combine(buffer, rank, handle))
    if rank == 0:
        assert time.monotonic() - began > SLEEP, "the GIL was not held"
        holder.join()
    else:
        assert time.monotonic() - began < SLEEP / 2, "rank 0's kernels waited for the GIL"


def an_interrupted_layout(buffer: deep_ep.Buffer, trial: Trial) -> None:
    """An interrupt ends the wait for a layout that is queued after a call whose peers are late: memory that the
    layout's kernel will use stays allocated, although the caller has no reference to it."""
    rank, engine = buffer.rank, buffer._engine
    topk_idx, experts = trial.work.topk_idx[rank], trial.work.num_experts
    arguments = dispatch_arguments(trial.work, rank, num_worst_tokens=trial.max_rows)
    dist.barrier()
    if rank != 0:
        dist.barrier()
    results = buffer.dispatch(**arguments, async_finish=True)
    if rank == 0:
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        with pytest.raises(KeyboardInterrupt):
            buffer.get_dispatch_layout(topk_idx.clone(), experts)
        assert len(engine._alone) == 1
        dist.barrier()
    results[5].current_stream_wait()
    trial.check_worst(rank, results, trial.max_rows)
    per_rank = buffer.get_dispatch_layout(topk_idx, experts)[0]
    assert per_rank.equal(arguments["num_tokens_per_rank"]) and not engine._alone


def an_event_is_of_its_own_call(buffer: deep_ep.Buffer, trial: Trial) -> None:
    """A call that was queued after it may need something that happens after the wait."""
    rank = buffer.rank
    arguments = dispatch_arguments(trial.work, rank)
    first = buffer.dispatch(**arguments, async_finish=True)
    if rank == 0:
        # The host waits for a dispatch's counts, so the call queued after it is a combine.
        second = trial.combine(buffer, rank, first[4], async_finish=True)
        first[5].current_stream_wait()
        dist.barrier()
    else:
        first[5].current_stream_wait()
        dist.barrier()
        second = trial.combine(buffer, rank, first[4], async_finish=True)
    second[2].current_stream_wait()
    trial.check_combine(rank, second)


def many_on_their_way(buffer: deep_ep.Buffer, trial: Trial) -> None:
    rank = buffer.rank
    config, on_their_way = deep_ep.Config(num_sms=2), []
    for _ in range(20):
        results = buffer.dispatch(**dispatch_arguments(trial.work, rank), async_finish=True, config=config)
        on_their_way.append(results)
    for results in reversed(on_their_way):
        results[5].current_stream_wait()
        trial.check_dispatch(rank, results)
    # Calls of both kinds alternate.
    buffer.dispatch(**dispatch_arguments(trial.work, rank), async_finish=True)
    round_trip(buffer, rank, trial, 2)


def other_threads_wait_and_watch(buffer: deep_ep.Buffer, trial: Trial) -> None:
    """While one thread makes calls, another waits for their events, and a third polls `stats`."""
    rank, calls = buffer.rank, 60
    handle = buffer.dispatch(**dispatch_arguments(trial.work, rank))[4]
    events: queue.SimpleQueue[Any] = queue.SimpleQueue()
    ends, raised = threading.Event(), []

    def wait_for_each() -> None:
        for _ in range(calls):
            events.get().current_stream_wait()

    def watch() -> None:
        while not ends.is_set():
            buffer.stats()

    def noting(what: Callable[[], None]) -> None:
        try:
            what()
        except Exception as error:
            raised.append(error)

    threads = [threading.Thread(target=noting, args=[what]) for what in (wait_for_each, watch)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for _ in range(calls):
            combined = trial.combine(buffer, rank, handle, async_finish=True)
            events.put(combined[2])
        threads[0].join()
        ends.set()
        threads[1].join()
    finally:
        sys.setswitchinterval(interval)
    assert not raised, raised
    trial.check_combine(rank, combined)


def an_event_of_another_buffer(buffer: deep_ep.Buffer, trial: Trial) -> None:
    """A call may read another Buffer's result if it is told to wait for it."""
    rank = buffer.rank
    other = make_buffer(dist.group.WORLD, trial.case, "peer")
    results = other.dispatch(**dispatch_arguments(trial.work, rank), async_finish=True)
    again = buffer.dispatch(**dispatch_arguments(trial.work, rank), previous_event=results[5], async_finish=True)
    again[5].current_stream_wait()
    trial.check_dispatch(rank, results)
    trial.check_dispatch(rank, again)


def a_buffer_beside_one_that_was_broken_off(trial: Trial) -> None:
    """The caller knows that its Buffer has failed, but the kernels do not: on a CPU they run while some thread
    waits."""
    broken = make_buffer(dist.group.WORLD, trial.case, "peer")
    rank = broken.rank
    dist.barrier()
    if rank == 0:
        pending = broken._begin_dispatch(**dispatch_arguments(trial.work, rank))
        broken.abort()
        kept_until_the_end.append(pending)
    dist.barrier()
    for _ in range(2):
        round_trip(make_buffer(dist.group.WORLD, trial.case, "peer"), rank, trial, 2)


def buffers_that_go(buffer: deep_ep.Buffer, trial: Trial) -> None:
    """Buffers being released delay no call of another: one that worked well, and one that failed and reported it."""
    rank = buffer.rank
    arguments = dispatch_arguments(trial.work, rank, num_worst_tokens=trial.max_rows)
    well, failed = (make_buffer(dist.group.WORLD, trial.case, "peer", timeout=4 * SLEEP) for _ in range(2))
    well.dispatch(**arguments)
    dist.barrier()
    if rank == 0:
        failed.abort()
    with pytest.raises(deep_ep.DeepEPError):
        failed.dispatch(**arguments)
    if rank == 0:
        dist.barrier()
    began, results = time.monotonic(), [buffer.dispatch(**arguments, async_finish=True)]
    for going in (well, failed):
        going.destroy()
        results.append(buffer.dispatch(**arguments, async_finish=True))
    if rank != 0:
        assert time.monotonic() - began < SLEEP, "calls waited for rank 0, which begins its own later"
        dist.barrier()
    for one in results:
        one[5].current_stream_wait()
        trial.check_worst(rank, one, trial.max_rows)


def what_fails_later(trial: Trial) -> None:
    """The wait or the next call reports it, whichever is first, and the Buffer does from then on."""
    for by in ("wait", "call", "destroy"):
        buffer = make_buffer(dist.group.WORLD, trial.case, "peer", timeout=1.0)
        rank = buffer.rank
        arguments = dispatch_arguments(trial.work, rank, num_worst_tokens=trial.max_rows)
        if rank != 0:
            results = buffer.dispatch(**arguments, async_finish=True)
            behind = buffer.dispatch(**arguments, async_finish=True)
            time.sleep(1.5)
            with pytest.raises(deep_ep.DeepEPError, match="rank 0"):
                if by == "wait":
                    results[5].current_stream_wait()
                elif by == "call":
                    buffer.dispatch(**arguments)
                else:
                    buffer.destroy()
            for event in (results[5], behind[5]):
                with pytest.raises(deep_ep.DeepEPError, match="what a dispatch returned is not complete.*rank 0"):
                    event.current_stream_wait()
            if by != "destroy":
                with pytest.raises(deep_ep.DeepEPError, match="broken"):
                    buffer.dispatch(**arguments)
        dist.barrier()


def what_a_recovery_leaves_behind(trial: Trial) -> None:
    buffer = make_buffer(dist.group.WORLD, trial.case, "peer")
    rank = buffer.rank
    arguments = dispatch_arguments(trial.work, rank, num_worst_tokens=trial.max_rows)
    results = buffer.dispatch(**arguments, async_finish=True) if rank != 0 else None
    if rank == 0:
        buffer.abort()
    buffer.recover()
    if results is not None:
        with pytest.raises(deep_ep.DeepEPError, match="has recovered, before it ended"):
            results[5].current_stream_wait()
    buffer.warmup(264, 4)
    round_trip(buffer, rank, trial, 2)


def the_process_ends(trial: Trial) -> None:
    """With a call in flight that its peers do not join: they are notified, and the process does end."""
    buffer = make_buffer(dist.group.WORLD, trial.case, "peer")
    rank = buffer.rank
    arguments = dispatch_arguments(trial.work, rank, num_worst_tokens=trial.max_rows)
    if rank == 0:
        kept_until_the_end.append((buffer, buffer.dispatch(**arguments, async_finish=True)))
        return
    time.sleep(8.0)
    began = time.monotonic()
    with pytest.raises(deep_ep.DeepEPError, match="rank 0"):
        buffer.dispatch(**arguments)
    assert time.monotonic() - began < SLEEP


def main() -> None:
    dist.init_process_group("gloo")
    trial = Trial.of(Case("async", 3, (10, 17, 24), hidden=264, topk=4, experts=12))
    buffer = make_buffer(dist.group.WORLD, trial.case, "peer")
    the_others_need_not_wait(buffer, trial, time.sleep)
    the_others_need_not_wait(buffer, trial, holding_the_gil)
    one_that_waits_while_another_holds_the_gil(buffer, trial)
    an_interrupted_layout(buffer, trial)
    an_event_is_of_its_own_call(buffer, trial)
    many_on_their_way(buffer, trial)
    other_threads_wait_and_watch(buffer, trial)
    an_event_of_another_buffer(buffer, trial)
    a_buffer_beside_one_that_was_broken_off(trial)
    buffers_that_go(buffer, trial)
    what_fails_later(trial)
    what_a_recovery_leaves_behind(trial)
    dist.barrier()
    the_process_ends(trial)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
