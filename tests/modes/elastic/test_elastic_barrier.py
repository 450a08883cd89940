"""V2's barrier is an operation: ordered, bounded, ended by failures, and without ranks that are left out."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

import deep_ep_py as deep_ep
from builds import FABRICS
from cases import BY_NAME
from elastic import ElasticTrial
from harness import under_schedules

TRIAL = ElasticTrial.of(BY_NAME["three_ranks"])


@pytest.mark.parametrize("fabric", FABRICS)
def test_it_waits_for_all_ranks(fabric: str) -> None:
    begun = [threading.Event() for _ in range(3)]

    def on_each_rank(group: Any) -> None:
        with TRIAL.make_buffer(group, fabric) as buffer:
            for turn in range(3):
                for event in begun:
                    event.clear()
                group.barrier()
                begun[buffer.rank_idx].set()
                buffer.barrier(with_cpu_sync=bool(turn % 2))
                assert all(event.is_set() for event in begun)
                group.barrier()

    under_schedules(3, on_each_rank)


def test_what_was_queued_before_has_ended() -> None:
    def on_each_rank(group: Any) -> None:
        with TRIAL.make_buffer(group, "peer") as buffer:
            rank = buffer.rank_idx
            results = TRIAL.dispatch(buffer, rank, do_expand=True, async_with_compute_stream=True)
            buffer.barrier()
            TRIAL.check(rank, results, expanded=True, exact=True)
            results.event.current_stream_wait()

    under_schedules(3, on_each_rank)


def test_a_rank_that_does_not_come_is_named() -> None:
    def on_each_rank(group: Any) -> None:
        with TRIAL.make_buffer(group, "peer", num_gpu_timeout_secs=0.5) as buffer:
            began = time.monotonic()
            if buffer.rank_idx != 1:
                with pytest.raises(deep_ep.DeepEPError, match="rank 1"):
                    buffer.barrier()
                assert time.monotonic() - began < 30
            group.barrier()
            if buffer.rank_idx == 1:
                with pytest.raises(deep_ep.DeepEPError, match="rank 0|rank 2"):
                    buffer.barrier()
            group.barrier()
            buffer.recover()
            buffer.barrier()

    under_schedules(3, on_each_rank, count=1)


def test_without_a_rank_that_is_left_out() -> None:
    def on_each_rank(group: Any) -> None:
        buffer = TRIAL.make_buffer(group, "peer")
        if buffer.rank_idx == 2:
            buffer.destroy()
            return
        buffer.recover([2])
        buffer.barrier()
        handle = TRIAL.dispatch(buffer, buffer.rank_idx).handle
        ids, experts = TRIAL.work.topk_idx[buffer.rank_idx], TRIAL.work.experts_per_rank
        assert torch.equal(handle.dst_buffer_slot_idx >= 0, (ids >= 0) & (ids < 2 * experts))
        buffer.destroy()

    under_schedules(3, on_each_rank, count=1)
