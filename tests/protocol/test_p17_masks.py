"""P17: all ranks leave out the same ranks, send nothing to them and wait for nothing from them."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

import deep_ep_py as deep_ep
from builds import FABRICS
from cases import BY_NAME, CASES, Case
from deep_ep_py.session import setup_ranks
from deep_ep_py.testing import run_ranks
from deep_ep_py.transport.bootstrap.start import exchange_heaps
from harness import Trial, barrier, dispatch_arguments, left_out, make_buffer, round_trip_without, under_schedules

TRIAL = Trial.of(BY_NAME["uniform"])
LOST = 1
MASKABLE = [case for case in CASES if 2 <= case.ranks <= 8]


@pytest.mark.parametrize("fabric", FABRICS)
def test_another_mask_is_found_before_a_row_is_sent(fabric: str) -> None:
    """One rank alone leaves out another. Each rank that it still sends counts to raises or is notified."""

    def on_each_rank(group: Any) -> Any:
        buffer = make_buffer(group, TRIAL.case, fabric, timeout=86400.0)
        rank = buffer.rank
        buffer.runtime.publish(1, [3] if rank == 0 else [])
        barrier(group)
        with pytest.raises(deep_ep.DeepEPError) as info:
            buffer.dispatch(**dispatch_arguments(TRIAL.work, rank))
        barrier(group)
        return str(info.value)

    for errors in under_schedules(4, on_each_rank):
        assert any("ranks left out" in error for error in errors), errors


@pytest.mark.parametrize("fabric", FABRICS)
def test_nothing_is_stored_into_a_rank_that_is_left_out(fabric: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its heap stays unchanged, bit by bit, except for the first page, which holds the words of the hosts."""
    rest = left_out(TRIAL, [LOST])
    heaps: list[Any] = []

    def remember(*arguments: Any) -> list[Any]:
        heaps[:] = exchange_heaps(*arguments)
        return list(heaps)

    def contents() -> torch.Tensor:
        heap = heaps[LOST]
        span = (ctypes.c_int64 * ((heap.bytes - 4096) // 8)).from_address(heap.base + 4096)
        return torch.frombuffer(span, dtype=torch.int64) + 1  # as in the test of P14

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, TRIAL.case, fabric, arena_bytes=1 << 16)
        rank = buffer.rank
        TRIAL.check_dispatch(rank, buffer.dispatch(**dispatch_arguments(TRIAL.work, rank)))
        barrier(group)
        if rank == LOST:
            buffer.destroy()
            barrier(group)
            before = contents()
            barrier(group)
            barrier(group)
            assert contents().equal(before)
        else:
            buffer.recover([LOST])  # until then, puts of the dispatch may be in flight
            barrier(group)
            barrier(group)
            round_trip_without(buffer, rank, TRIAL, rest)
            barrier(group)

    monkeypatch.setattr(setup_ranks, "exchange_heaps", remember)
    under_schedules(4, on_each_rank)


@pytest.mark.parametrize(
    ("case", "fabric"),
    [(case, fabric) for case in MASKABLE for fabric in ((case.fabric,) if case.fabric else FABRICS)],
    ids=lambda value: value.name if isinstance(value, Case) else value,
)
def test_shapes(case: Case, fabric: str) -> None:
    """With any routing, rows for ranks that are left out are dropped, and sums cover the others."""
    lost = [0, case.ranks - 1] if case.ranks > 2 else [1]
    trial = Trial.of(case)
    rest = left_out(trial, lost)

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, case, fabric)
        if buffer.rank in lost:
            buffer.destroy()
        else:
            buffer.recover(lost)
            round_trip_without(buffer, buffer.rank, trial, rest)

    under_schedules(case.ranks, on_each_rank, count=2)


@pytest.mark.once
def test_more_ranks_than_a_word_has_bits() -> None:
    """Masks, recovery words and reports handle 70 ranks just like 4."""
    case = Case("seventy_ranks", ranks=70, tokens=2, topk=4, experts=70, hidden=8, max_blocks=1, cached=False)
    trial, lost = Trial.of(case), [2, 67]
    rest = left_out(trial, lost)

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, case, "peer", num_nvl_bytes=1 << 20, arena_bytes=1 << 16)
        rank = buffer.rank
        if rank in lost:
            buffer.destroy()
            return
        buffer.recover(lost)
        assert buffer.masked_ranks == lost
        results = buffer.dispatch(**dispatch_arguments(trial.work, rank))
        rest.check_dispatch(rank, results)
        rest.check_combine(rank, rest.combine(buffer, rank, results[4], 1), 1)

    run_ranks(70, on_each_rank, seed=3)
