"""Runs over the stand-in for the driver: ranks as threads of one process that share a GPU."""

from __future__ import annotations

from typing import Any

import pytest

import pretend_gpu
from cases import Case
from deep_ep_py.errors import PeerFailed
from deep_ep_py.testing import run_ranks
from harness import Trial, make_buffer, round_trip

CASE = Case("threads", 4, (10, 17, 24, 31), hidden=264, topk=4, experts=16)


def on_each_rank(group: Any, trial: Trial) -> int:
    buffer = make_buffer(group, CASE, "peer", device="cuda")
    for blocks in (1, 2):
        round_trip(buffer, buffer.rank, trial, blocks)
    assert group.all_gather_object(buffer.rank) == [0, 1, 2, 3]
    return group.broadcast_object(buffer.rank, src=2)


def fails(group: Any) -> None:
    if group.rank() == 1:
        raise ZeroDivisionError("the cause")
    group.barrier()


if __name__ == "__main__":
    pretend_gpu.install()
    assert run_ranks(4, on_each_rank, Trial.of(CASE), device="cuda") == [2] * 4
    with pytest.raises(ZeroDivisionError, match="the cause") as info:
        run_ranks(4, fails, device="cuda")
    assert isinstance(info.value.rank_exceptions[0], PeerFailed)
    print("done")
