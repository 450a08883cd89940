"""Runs over the stand-in for the driver: what may happen between a failure and its report to the caller."""

from __future__ import annotations

import gc
import os
import re
import sys
from typing import Any

import torch

import pretend_gpu
from cases import BY_NAME
from deep_ep_py.base.events import EventHandle
from deep_ep_py.errors import DeepEPError
from deep_ep_py.modes.normal.handles import record_of
from deep_ep_py.testing import run_ranks
from harness import Trial, dispatch_arguments, left_out, make_buffer, round_trip_without

TRIAL = Trial.of(BY_NAME["two_ranks"])
TWO_HOPS = Trial.of(BY_NAME["2x2_uniform"])
kept_alive: list[Any] = []


def raised(call: Any) -> str:
    """Return the error that a call raises, or an empty string."""
    try:
        call()
    except DeepEPError as error:
        return str(error)
    return ""


def worst(rank: int, trial: Trial = TRIAL) -> dict[str, Any]:
    """Return the arguments of a dispatch that blocks on nothing on the host."""
    return dispatch_arguments(trial.work, rank, num_worst_tokens=trial.max_rows)


def do_not_wait(device: Any, tensors: Any, *_: Any) -> EventHandle:
    """Behave as on a GPU, where the caller's stream waits for a call's end and the host does not."""
    kept_alive.append(tensors)
    return EventHandle()


def untold(group: Any, between: str) -> None:
    """A Buffer fails before any call has reported it. Another one that recovers, or is made, in between must not
    continue with the results of the first."""
    first, other = (make_buffer(group, TRIAL.case, "peer", device="cuda", timeout=timeout) for timeout in (1.0, 30.0))
    rank = first.rank
    group.barrier()
    if rank == 0:
        kept_alive.append(first.dispatch(**worst(rank)))  # rank 1 does not call it
    group.barrier()
    if between == "recover":
        other.recover()
    elif between == "make":
        other = make_buffer(group, TRIAL.case, "peer", device="cuda", timeout=30.0)
    group.barrier()

    def go_on() -> None:
        kept_alive.append(other.dispatch(**worst(rank)))
        other.check()

    assert raised(go_on), "results of a failure were used, and nothing was raised"
    group.barrier()
    assert rank != 0 or "rank 1" in raised(first.check)
    group.barrier()


def still_waiting(group: Any) -> None:
    """Checking a Buffer whose own kernels still wait clears nothing: one of them was queued after the failure."""
    first, other = (make_buffer(group, TRIAL.case, "peer", device="cuda", timeout=timeout) for timeout in (1.0, 60.0))
    kept_alive.extend((first, other))
    rank = first.rank
    group.barrier()
    if rank == 0:
        kept_alive.append(other.dispatch(**worst(rank)))  # waits for rank 1, which is late
        kept_alive.append(first.dispatch(**worst(rank)))  # rank 1 does not call it
        kept_alive.append(other.dispatch(**worst(rank)))
        assert first.runtime.settle(20.0), "its kernel waits for no longer than 1 s"
        assert raised(first.check)
        with other.timeout_of(0.2):
            other.check()
    group.barrier()
    if rank == 1:
        raised(lambda: kept_alive.extend(other.dispatch(**worst(rank)) for _ in range(2)))
    assert other.runtime.settle(20.0)
    assert raised(other.check), "an operation that was queued after a failure succeeded"
    group.barrier()


def a_handle_in_a_graph(group: Any) -> None:
    """A graph keeps the handle that it was captured with, and does not run once a rank of that handle is left out."""
    buffer = make_buffer(group, TRIAL.case, "peer", device="cuda", timeout=5.0)
    rank = buffer.rank
    results = buffer.dispatch(**dispatch_arguments(TRIAL.work, rank))
    x = TRIAL.work.x[rank].clone()
    graph = pretend_gpu.Graph()
    with graph.capture():
        out = buffer.dispatch(x, handle=results[4])[0]
    shape = record_of(results[4]).plan.token_row.shape
    del results
    gc.collect()
    others = [torch.zeros(shape, dtype=torch.int32) for _ in range(64)]
    group.barrier()
    out.zero_()
    graph.replay()
    buffer.check()
    assert out.equal(TRIAL.received[rank].x), "the handle's memory has been reused"
    group.barrier()
    if rank == 1:
        buffer.destroy()
    else:
        buffer.recover([1])
        graph.replay()
        said = raised(buffer.check)
        assert "the graph is from before rank 1 was left out" in said, said
    group.barrier()
    del others


def a_graph_of_two_hops(group: Any, fabric: str) -> None:
    """A graph captured when every rank forwarded only for itself does not run once one also takes another's place."""
    buffer = make_buffer(group, TWO_HOPS.case, fabric, device="cuda", timeout=20.0)
    rank, lost, graph = buffer.rank, 3, pretend_gpu.Graph()
    arguments = worst(rank, TWO_HOPS)
    with graph.capture():
        results = buffer.dispatch(**arguments)
    graph.replay()
    buffer.check()
    TWO_HOPS.check_worst(rank, results, TWO_HOPS.max_rows)
    group.barrier()
    if rank == lost:
        buffer.destroy()
    else:
        buffer.recover([lost])
        graph.replay()
        said = raised(buffer.check)
        assert re.search(rf"from before (rank {lost} was left out|it left out rank {lost})", said), said
        buffer.recover()
        round_trip_without(buffer, rank, TWO_HOPS, left_out(TWO_HOPS, [lost]))
    group.barrier()


class Interrupted:
    """A runtime that is interrupted as by Ctrl-C between the two meetings of a recovery."""

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runtime, name)

    def clear_words(self, generation: int) -> None:
        raise KeyboardInterrupt


def recoveries_that_fail_half_way(group: Any, fabric: str) -> None:
    """Two failed recoveries in a row, so that the words of the second one's generation are in the bank of the
    generation that the ranks are still in. A graph that is replayed then exits at once."""
    buffer = make_buffer(group, TRIAL.case, fabric, device="cuda", timeout=2.0)
    rank, engine = buffer.rank, buffer._engine
    arguments, graph = worst(buffer.rank), pretend_gpu.Graph()
    with graph.capture():
        results = buffer.dispatch(**arguments)
    for attempt in range(2):
        for caller in (0, 1) if attempt == 0 else (None,):  # in turn, then together
            group.barrier()
            if caller not in (None, rank):
                continue
            runtime = engine.runtime
            if caller is None and rank == 1:
                engine._runtime = Interrupted(runtime)
            try:
                buffer.recover(timeout=1.0)
            except (DeepEPError, KeyboardInterrupt):
                pass
            else:
                raise AssertionError("the other rank has not come")
            finally:
                engine._runtime = runtime
    group.barrier()
    results[0].zero_()
    graph.replay()
    group.barrier()
    assert not results[0].any(), "a replay on a broken Buffer has stored rows"
    buffer.recover()
    graph.replay()
    buffer.check()
    TRIAL.check_worst(rank, results, TRIAL.max_rows)
    group.barrier()


def main() -> None:
    pretend_gpu.install(compile_kernels=False)
    if "waiting" in sys.argv:
        pretend_gpu.PretendGpu.order_caller_after = do_not_wait  # type: ignore[method-assign]
        run_ranks(2, still_waiting, device="cuda")
        print("ended", flush=True)
        os._exit(0)  # the kernels use memory that is not theirs alone
    for between in ("nothing", "recover", "make"):
        run_ranks(2, untold, between, device="cuda")
    run_ranks(2, a_handle_in_a_graph, device="cuda")
    for fabric in ("ibgda", "proxy"):
        run_ranks(4, a_graph_of_two_hops, fabric, device="cuda")
    for fabric in ("peer", "proxy"):
        run_ranks(2, recoveries_that_fail_half_way, fabric, device="cuda")
    print("ended")


if __name__ == "__main__":
    main()
