"""Runs over the stand-in for the driver: calls of one Buffer on several streams, some of which are busy on one rank.

If the kernels did not run in the order of their launches, that rank would give the calls other numbers than its peer.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pretend_gpu
from cases import BY_NAME
from deep_ep_py import Buffer
from deep_ep_py.testing import run_ranks
from harness import Trial, dispatch_arguments
from low_latency import BF16, Work, check_combine, check_dispatch, combine, dispatch, make_buffer
from low_latency_gpu import BY_NAME as LOW_LATENCY
from pretend_gpu import busy, make_stream, on_stream

CALLS = 5
REGIONS = 3
TRIAL = Trial.of(BY_NAME["two_ranks"])


def alternate(group: Any, hooks: bool) -> None:
    """Low-latency calls on two streams by turns."""
    sizes = LOW_LATENCY["low_latency_two_ranks"]
    buffer = make_buffer(group, sizes, "peer", device="cuda", regions=REGIONS)
    rank, streams = buffer.rank, [make_stream(), make_stream()]
    works = [Work.of(sizes, seed) for seed in range(CALLS)]
    with busy(streams[0]) if rank == 0 else nullcontext():
        dispatched = []
        for call, work in enumerate(works):
            with on_stream(streams[call % 2]):
                dispatched.append(dispatch(buffer, work, return_recv_hook=hooks))
                if hooks:
                    dispatched[-1][4]()
    assert buffer.runtime.settle(20.0)
    for work, results in zip(works, dispatched, strict=True):
        check_dispatch(work, rank, BF16, results)
    with busy(streams[0]) if rank == 1 else nullcontext():
        combined = []
        for call, (work, results) in enumerate(zip(works, dispatched, strict=True)):
            with on_stream(streams[call % 2]):
                combined.append(combine(buffer, work, results[2]))
    assert buffer.runtime.settle(20.0)
    for work, (sums, _, _) in zip(works, combined, strict=True):
        check_combine(work, rank, sums)
    group.barrier()


def both_modes(group: Any) -> None:
    """Low-latency calls on the caller's stream, those of normal mode on the communication stream."""
    sizes = LOW_LATENCY["low_latency_two_ranks"]
    size, options = 1 << 20, {"low_latency_mode": True, "fabric": "peer", "arena_bytes": 1 << 24}
    buffer = Buffer(group, size, size, device="cuda", regions=REGIONS, **options)
    rank, stream = buffer.rank, make_stream()
    works = [Work.of(sizes, seed) for seed in range(CALLS)]
    worst = dispatch_arguments(TRIAL.work, rank, num_worst_tokens=TRIAL.max_rows)
    with busy(stream) if rank == 0 else nullcontext(), on_stream(stream):
        calls = [(dispatch(buffer, work), buffer.dispatch(**worst)) for work in works]
    assert buffer.runtime.settle(20.0)
    for work, (low_latency, normal) in zip(works, calls, strict=True):
        check_dispatch(work, rank, BF16, low_latency)
        TRIAL.check_worst(rank, normal, TRIAL.max_rows)
    group.barrier()


if __name__ == "__main__":
    pretend_gpu.install(compile_kernels=False)
    for hooks in (False, True):
        run_ranks(2, alternate, hooks, device="cuda")
    run_ranks(2, both_modes, device="cuda")
