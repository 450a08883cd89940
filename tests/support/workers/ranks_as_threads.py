"""Runs over the stand-in for the driver: the named cases on ranks that are threads of one process and share a GPU.

Arguments select cases.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import pretend_gpu
from cases import BY_NAME
from deep_ep_py import Buffer
from deep_ep_py.base.native import C
from deep_ep_py.device import cuda
from deep_ep_py.errors import DeepEPError, DeepEPTimeout, PeerFailed
from deep_ep_py.testing import run_ranks
from fp8 import KINDS, Fp8Trial
from gpu_ranks import FABRICS, check_what_a_failing_link_says, link_that_fails, run_named_cases
from graphs import Captured
from harness import Trial, dispatch_arguments, make_buffer, round_trip

MAX_RANKS = 16


def meet(group: Any) -> Any:
    assert group.all_gather_object(group.rank()) == list(range(group.size()))
    group.barrier()
    return group.broadcast_object(group.rank(), src=2)


def fail(group: Any) -> None:
    if group.rank() == 1:
        raise ZeroDivisionError("the cause")
    group.barrier()


def loads_nothing_when_warm(group: Any) -> None:
    """After a warm-up no call loads code or allocates, except for outputs."""
    trial = Trial.of(BY_NAME["two_ranks"])
    buffer = make_buffer(group, trial.case, "peer", device="cuda")
    buffer.warmup(trial.case.hidden, trial.case.topk)
    group.barrier()
    before = Path(os.environ["DOUBLE_LOG"]).read_text()
    group.barrier()
    round_trip(buffer, buffer.rank, trial, blocks=2)
    group.barrier()
    calls = Path(os.environ["DOUBLE_LOG"]).read_text()[len(before) :]
    loading = (
        "loads at",
        "cuModuleLoadData",
        "cuFuncLoad",
        "cuCtxSetLimit",
        "cuEventCreate",
        "cuMemAlloc",
        "cuMemHost",
    )
    assert "launch grid" in calls and not any(call in calls for call in loading)
    group.barrier()


def shares_with_its_proxy(group: Any) -> None:
    """All state shared by kernels and a proxy is in pinned host memory: commands, progress counters, a fault, and
    words."""

    def pinned(fabric: str) -> int:
        group.barrier()
        before = Path(os.environ["DOUBLE_LOG"]).read_text().count("cuMemHostAlloc")
        group.barrier()
        kept_alive.append(make_buffer(group, BY_NAME["two_ranks"], fabric, device="cuda"))
        group.barrier()
        return Path(os.environ["DOUBLE_LOG"]).read_text().count("cuMemHostAlloc") - before

    kept_alive: list[Buffer] = []
    assert pinned("proxy") == pinned("peer") + group.size() * 4


def capture(buffer: Any, trials: list[Trial]) -> Captured:
    graph = pretend_gpu.Graph()
    return Captured(buffer, trials, graph.capture, graph.replay)


def graphs(group: Any, fabric: str) -> None:
    """Graphs of two batch sizes are replayed between eager calls, in any order, with different routing each time."""
    kinds = [[Trial.of(BY_NAME[name], seed) for seed in (1, 2, 3)] for name in ("uneven_tokens", "uniform")]
    buffer = make_buffer(group, kinds[0][0].case, fabric, device="cuda")
    pending = buffer._begin_dispatch(**dispatch_arguments(kinds[1][0].work, buffer.rank))
    with pytest.raises(DeepEPError, match="in a capture while operation 0, begun outside it, is open"):
        capture(buffer, kinds[0])
    kinds[1][0].check_dispatch(buffer.rank, pending.finish())
    with pytest.raises(ValueError, match="num_worst_tokens=0"), pretend_gpu.Graph().capture():
        buffer.dispatch(**dispatch_arguments(kinds[0][0].work, buffer.rank))
    captured = [capture(buffer, trials) for trials in kinds]
    for which, seed in ((0, 1), (1, 2), (1, 0), (0, 0), (0, 2)):
        captured[which].replay(kinds[which][seed])
        round_trip(buffer, buffer.rank, kinds[1 - which][seed], blocks=2)
    group.barrier()


def compiling(group: Any) -> None:
    """A rank that waits for one that is compiling learns so, in the log while it waits and from its timeout."""
    trial = Trial.of(BY_NAME["two_ranks"])
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    for timeout in (60.0, 1.0):
        buffer = make_buffer(group, trial.case, "peer", device="cuda", timeout=timeout)
        arguments = dispatch_arguments(trial.work, buffer.rank)
        device = buffer._engine.device
        if buffer.rank == 1:
            load = device._load

            def slowly(*arguments: Any, load: Any = load, seconds: int = 2 if timeout == 60.0 else 5) -> None:
                time.sleep(seconds)
                load(*arguments)

            device._load = slowly
            with suppress(DeepEPError):
                buffer.dispatch(**arguments)
        elif timeout == 60.0:
            logging.getLogger("deep_ep_py").addHandler(handler)
            buffer.dispatch(**arguments)
            logging.getLogger("deep_ep_py").removeHandler(handler)
            assert messages == ["rank 0 waits in dispatch: rank 1 is still compiling its kernels"], messages
        else:
            with pytest.raises(DeepEPTimeout, match="rank 1 is still compiling its kernels") as info:
                buffer.dispatch(**arguments)
            assert info.value.compiling == [1]
        group.barrier()


def fp8_rows(group: Any) -> None:
    case = BY_NAME["uneven_tokens"]
    buffer = make_buffer(group, case, "peer", device="cuda")
    for kind in KINDS:
        Fp8Trial.of(case, kind, torch.int32).round_trip(buffer)
    group.barrier()


def pool(group: Any) -> None:
    """The memory that torch's allocator gets for a pool: from the arena, and outliving the Buffer, or none."""
    allocate, free = pretend_gpu.pool_functions()
    size = 2 << 20
    buffer = make_buffer(group, BY_NAME["two_ranks"], "peer", device="cuda", arena_bytes=size)
    runtime = buffer._engine.runtime
    with C.cuda.pool_over(runtime, grows=True):
        inside, full = allocate(size, 0, None), allocate(size, 0, None)
    outside = allocate(size, 0, None)
    assert runtime.arena_contains(inside, size) and runtime.arena_used == size
    assert full is None and outside is None
    free(inside, size, 0, None)
    assert runtime.arena_used == 0
    with C.cuda.pool_over(runtime, grows=False):
        inside = allocate(size, 0, None)
    assert runtime.arena_contains(inside, size)
    del runtime
    buffer.destroy()
    ctypes.memset(inside, 1, size)
    free(inside, size, 0, None)


def refused_pool(group: Any) -> None:
    """If torch supports no pool over the arena, rows go in rounds, and that is reported once."""
    trial = Trial.of(BY_NAME["two_ranks"])
    buffer = make_buffer(group, trial.case, "peer", device="cuda")
    device = buffer._engine.device
    said = ["expandable_segments is not supported with MemPools\nand a trace"]

    def refuse(*_: Any) -> Any:
        raise RuntimeError(said[0])

    device._empty_in_pool = refuse
    with warnings_about_pools(group) as told:
        for _ in range(2):
            round_trip(buffer, buffer.rank, trial, blocks=2)
    assert len(told) == 1, told
    assert "(expandable_segments is not supported with MemPools), so rows go in rounds" in told[0], told
    assert buffer.stats()["rounds"] and not buffer.stats()["direct"], buffer.stats()
    device._pool_refused, said[0] = False, "CUDA error: an illegal memory access was encountered"
    with pytest.raises(RuntimeError, match="illegal memory access"):
        device.allocate(buffer._engine.runtime, (1, 8), torch.bfloat16, False)
    group.barrier()


def old_torch(group: Any) -> None:
    """A pool of theirs would receive the allocations of other threads as well."""
    cuda._POOLS_SINCE = "99"
    trial = Trial.of(BY_NAME["two_ranks"])
    with warnings_about_pools(group) as told:
        buffer = make_buffer(group, trial.case, "peer", device="cuda")
        round_trip(buffer, buffer.rank, trial, blocks=2)
    assert len(told) == 1 and "expected torch 99 or later" in told[0], told
    assert buffer.stats()["rounds"] and not buffer.stats()["direct"], buffer.stats()


@contextmanager
def warnings_about_pools(group: Any) -> Iterator[list[str]]:
    """Collect the warnings that torch's pools cannot be used. Threads share a log: each receives all of it."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    handler.addFilter(lambda record: "torch does not take memory" in record.getMessage())
    logging.getLogger("deep_ep_py").addHandler(handler)
    group.barrier()
    yield told
    group.barrier()
    logging.getLogger("deep_ep_py").removeHandler(handler)


def weak(group: Any) -> None:
    with pytest.raises(ValueError, match="fabric='weak': expected one of peer, ibgda, proxy on"):
        make_buffer(group, BY_NAME["two_ranks"], "weak", device="cuda")
    with pytest.raises(ValueError, match="ranks_per_node=1: expected fabric='proxy' with it on a GPU"):
        Buffer(group, 1 << 20, device="cuda", ranks_per_node=1)


def fails_later(group: Any) -> None:
    """The host does not wait for kernels: a call's failure is raised by the next call, or by destroy."""
    trial = Trial.of(BY_NAME["two_ranks"])
    for ending in ("call", "destroy", "graph"):
        buffer = make_buffer(group, trial.case, "peer", device="cuda", timeout=1.0)
        arguments = dispatch_arguments(trial.work, buffer.rank, num_worst_tokens=trial.max_rows)
        graph = pretend_gpu.Graph()
        if ending == "graph":
            with graph.capture():
                kept = buffer.dispatch(**arguments)  # as a graph's pool would
        if buffer.rank == 0:
            if ending == "graph":
                graph.replay()
            else:
                buffer.dispatch(**arguments)  # rank 1 does not call it, and nothing is raised
            with pytest.raises(DeepEPTimeout, match="rank 1"):
                buffer.destroy() if ending == "destroy" else buffer.dispatch(**arguments)
        group.barrier()
        if buffer.rank == 1:  # its kernels find that rank 0 has given up
            buffer.dispatch(**arguments)
            with pytest.raises(DeepEPError, match="because rank 0 waited too long for rank 1"):
                buffer.destroy()
        buffer.destroy()
    del kept


def recovers(group: Any, fabric: str) -> None:
    """A replayed graph fails on all ranks because one does not replay it, and calls queued after it fail with it. The
    ranks recover, and continue with eager calls and the same graph, whose tickets still carry the failure's marks."""
    trials = [Trial.of(BY_NAME["uneven_tokens"], seed) for seed in (1, 2)]
    buffer = make_buffer(group, trials[0].case, fabric, device="cuda", timeout=1.0)
    captured = capture(buffer, trials)
    captured.replay(trials[0])
    buffer.check()
    for absent in (1, 2):
        group.barrier()
        if buffer.rank != absent:
            for _ in range(3):
                captured.run()
            with pytest.raises(DeepEPError):
                buffer.check()
            with pytest.raises(DeepEPError, match="is broken"):
                round_trip(buffer, buffer.rank, trials[1], blocks=2)
        group.barrier()
        buffer.recover()
        buffer.check()
        captured.replay(trials[1])
        round_trip(buffer, buffer.rank, trials[0], blocks=2)
        captured.replay(trials[0])
    group.barrier()


def dropped_graphs(group: Any) -> None:
    """A Buffer forgets the calls of graphs that can no longer run; their tickets are reused."""
    trial = Trial.of(BY_NAME["two_ranks"])
    buffer = make_buffer(group, trial.case, "peer", device="cuda")
    arguments = dispatch_arguments(trial.work, buffer.rank, num_worst_tokens=trial.max_rows)
    kept = pretend_gpu.Graph()
    with kept.capture():
        results = buffer.dispatch(**arguments)
    for _ in range(5):
        graph = pretend_gpu.Graph()
        with graph.capture():
            outputs = [buffer.dispatch(**arguments) for _ in range(3)]  # as a graph's pool would
        group.barrier()
        graph.replay()
        buffer.check()
        for again in outputs:
            trial.check_worst(buffer.rank, again, trial.max_rows)
        assert len(buffer._engine._captured) == 4
        graph.drop()
        buffer.check()
        assert len(buffer._engine._captured) == 1
    group.barrier()
    kept.replay()
    trial.check_worst(buffer.rank, results, trial.max_rows)
    group.barrier()


def behind_another_buffer(group: Any) -> None:
    """Calls of a second Buffer that are queued after a failure of the first exit, because they may use its results.
    Once the first one's failure has been raised the second continues, unless its calls were among these."""
    trial = Trial.of(BY_NAME["two_ranks"])
    first, idle, queued = (
        make_buffer(group, trial.case, "peer", device="cuda", timeout=timeout) for timeout in (1.0, 60.0, 60.0)
    )
    rank, arguments = first.rank, dispatch_arguments(trial.work, first.rank, num_worst_tokens=trial.max_rows)
    group.barrier()
    if rank == 0:
        first.dispatch(**arguments)  # rank 1 does not call it
        queued.dispatch(**arguments)
        with pytest.raises(DeepEPTimeout, match="rank 1"):
            first.check()
        with pytest.raises(DeepEPError, match="queued behind an operation of another Buffer"):
            queued.check()
    group.barrier()
    if rank == 1:
        with pytest.raises(DeepEPError, match="because rank 0 had an operation fail on another of its Buffers"):
            queued.dispatch(**arguments)
            queued.check()
    group.barrier()
    trial.check_dispatch(rank, idle.dispatch(**dispatch_arguments(trial.work, rank)))
    for buffer in (first, queued):
        buffer.recover()
        trial.check_dispatch(rank, buffer.dispatch(**dispatch_arguments(trial.work, rank)))
    group.barrier()


def layouts(group: Any) -> None:
    """A layout of a graph has words of its own: what a call has left in those of the Buffer does not matter to it."""
    trial = Trial.of(BY_NAME["uniform"])
    buffer = make_buffer(group, trial.case, "peer", device="cuda")
    ids = dispatch_arguments(trial.work, buffer.rank)["topk_idx"].clone()
    graph = pretend_gpu.Graph()
    with graph.capture():
        replayed = buffer.get_dispatch_layout(ids, trial.case.experts)
    for _ in range(2):
        called = buffer.get_dispatch_layout(ids, trial.case.experts)
        graph.replay()
        for ours, theirs in zip(replayed[:4], called[:4], strict=True):
            assert (ours is None) == (theirs is None) and (ours is None or torch.equal(ours, theirs))
        ids = ids.copy_(ids.flip(0))


def other_calls() -> None:
    assert run_ranks(4, meet, device="cuda") == [2] * 4
    with pytest.raises(ZeroDivisionError, match="the cause") as info:
        run_ranks(4, fail, device="cuda")
    assert isinstance(info.value.rank_exceptions[0], PeerFailed)
    run_ranks(2, loads_nothing_when_warm, device="cuda")
    run_ranks(2, shares_with_its_proxy, device="cuda")
    for fabric in ("peer", "proxy"):
        run_ranks(4, graphs, fabric, device="cuda")
        run_ranks(4, recovers, fabric, device="cuda")
    run_ranks(2, fails_later, device="cuda")
    run_ranks(2, behind_another_buffer, device="cuda")
    run_ranks(2, dropped_graphs, device="cuda")
    run_ranks(4, layouts, device="cuda")
    run_ranks(2, pool, device="cuda")
    run_ranks(4, fp8_rows, device="cuda")
    run_ranks(2, refused_pool, device="cuda")
    run_ranks(2, old_torch, device="cuda")
    cuda._POOLS_SINCE = "2.8"
    run_ranks(2, weak, device="cuda")
    run_ranks(2, compiling, device="cuda")
    trial = Trial.of(BY_NAME["uniform"])
    for fabric in FABRICS:
        said = run_ranks(trial.case.ranks, link_that_fails, trial, fabric, device="cuda")
        check_what_a_failing_link_says(said, fabric)


def main() -> None:
    pretend_gpu.install(compile_kernels=False)
    names = sys.argv[1:]
    if not names:
        other_calls()
    run_named_cases(MAX_RANKS, names, device="cuda")


if __name__ == "__main__":
    main()
