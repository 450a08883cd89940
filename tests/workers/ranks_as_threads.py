"""Runs over the stand-in for the driver: the named cases on ranks that are threads of one process and share a GPU."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import pretend_gpu
from cases import BY_NAME, CASES
from deep_ep_py.errors import PeerFailed
from deep_ep_py.testing import run_ranks
from harness import Trial, make_buffer, round_trip
from test_gpu import on_each_rank

MOST_RANKS = 16


def meet(group: Any) -> Any:
    assert group.all_gather_object(group.rank()) == list(range(group.size()))
    group.barrier()
    return group.broadcast_object(group.rank(), src=2)


def fail(group: Any) -> None:
    if group.rank() == 1:
        raise ZeroDivisionError("the cause")
    group.barrier()


def loads_nothing_when_warm(group: Any) -> None:
    """After a warm-up no call loads code or allocates, but for the outputs."""
    trial = Trial.of(BY_NAME["two_ranks"])
    buffer = make_buffer(group, trial.case, "peer", device="cuda")
    buffer.warmup(trial.case.hidden, trial.case.topk)
    group.barrier()
    before = Path(os.environ["DOUBLE_LOG"]).read_text()
    group.barrier()
    round_trip(buffer, buffer.rank, trial, blocks=2)
    group.barrier()
    calls = Path(os.environ["DOUBLE_LOG"]).read_text()[len(before) :]
    assert "launch grid" in calls and not any(call in calls for call in ("cuModuleLoadData", "cuMemAlloc", "cuMemHost"))
    group.barrier()


def main() -> None:
    pretend_gpu.install(compile_kernels=False)
    assert run_ranks(4, meet, device="cuda") == [2] * 4
    with pytest.raises(ZeroDivisionError, match="the cause") as info:
        run_ranks(4, fail, device="cuda")
    assert isinstance(info.value.rank_exceptions[0], PeerFailed)
    run_ranks(2, loads_nothing_when_warm, device="cuda")
    for case in CASES:
        if case.fabric in (None, "peer") and case.ranks <= MOST_RANKS:
            run_ranks(case.ranks, on_each_rank, Trial.of(case), device="cuda")
            print(case.name)


if __name__ == "__main__":
    main()
