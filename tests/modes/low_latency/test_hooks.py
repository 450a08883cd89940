"""Calls in halves: several open at once, hooks in any order, dropped hooks, refused calls; mixed modes and shapes."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

import deep_ep_py as deep_ep
from cases import Case
from deep_ep_py.testing import run_ranks, sleep
from harness import Trial, barrier, round_trip, under_schedules
from low_latency import BF16, CASTS, Sizes, Work, check_combine, check_dispatch, combine, dispatch, make_buffer
from low_latency import round_trip as low_latency_round_trip

SIZES = Sizes("hooks", 3, (9, 40, 0), 40, 128, 4, 6)
MIXED = ("peer", "proxy", "ibgda", "mixed")
NORMAL = Trial.of(Case("beside", 3, 12, hidden=64, topk=2, experts=6))


def works(*seeds: int) -> list[Work]:
    return [Work.of(SIZES, seed) for seed in seeds]


@pytest.mark.parametrize("fabric", MIXED)
def test_two_layers_in_turns(fabric: str) -> None:
    """Like two micro-batches: both dispatches are in flight, and hooks are called in another order."""
    both = works(1, 2)

    def on_each_rank(group: Any) -> None:
        with make_buffer(group, SIZES, fabric) as buffer:
            for first, second in ((0, 1), (1, 0), (0, 1)):
                sent = [dispatch(buffer, work, return_recv_hook=True) for work in both]
                for i in (first, second):
                    sent[i][4]()
                    check_dispatch(both[i], buffer.rank, BF16, sent[i])
                returned = [combine(buffer, both[i], sent[i][2], return_recv_hook=True) for i in (second, first)]
                for (combined, _, hook), i in zip(reversed(returned), (first, second), strict=True):
                    hook()
                    check_combine(both[i], buffer.rank, combined)

    under_schedules(SIZES.ranks, on_each_rank)


def test_a_region_is_needed_again() -> None:
    """Operation n is refused while operation n - regions is open, even if it is the only open one."""
    (work,) = works(1)

    def on_each_rank(group: Any) -> None:
        with make_buffer(group, SIZES, "peer") as buffer:
            hooks = [dispatch(buffer, work, return_recv_hook=True)[4] for _ in range(2)]
            hooks[1]()
            with pytest.raises(deep_ep.DeepEPError, match="needs the region of operation 0, which is still open"):
                dispatch(buffer, work)
            hooks[0]()
            low_latency_round_trip(buffer, work)

    run_ranks(SIZES.ranks, on_each_rank, seed=1)


@pytest.mark.parametrize("fabric", ["peer", "ibgda"])
def test_a_dropped_hook_runs_before_the_next_call(fabric: str) -> None:
    (work,) = works(1)

    def on_each_rank(group: Any) -> None:
        with make_buffer(group, SIZES, fabric) as buffer:
            for _ in range(3):
                results = dispatch(buffer, work, return_recv_hook=True)
                packed, counts, handle = results[:3]
                del results
                gc.collect()
                low_latency_round_trip(buffer, work)
                check_dispatch(work, buffer.rank, BF16, (packed, counts, handle))
            assert not buffer._engine.dropped
            for _ in range(3):  # a call of the other mode counts too
                dispatch(buffer, work, return_recv_hook=True)
                gc.collect()
                round_trip(buffer, buffer.rank, NORMAL, 1)
            dispatch(buffer, work, return_recv_hook=True)
            gc.collect()

    gc.collect()
    gc.freeze()  # excludes existing objects from collections, which would take most of the time
    try:
        under_schedules(SIZES.ranks, on_each_rank)
    finally:
        gc.unfreeze()


def test_hooks_that_cannot_be_called() -> None:
    (work,) = works(1)

    def on_each_rank(group: Any) -> None:
        with make_buffer(group, SIZES, "peer") as buffer:
            hook = dispatch(buffer, work, return_recv_hook=True)[4]
            hook()
            with pytest.raises(deep_ep.DeepEPError, match="low-latency dispatch: its hook has already been called"):
                hook()
            hook = dispatch(buffer, work, return_recv_hook=True)[4]
            barrier(group)  # a recovery ends the calls that other ranks are in
            buffer.recover()
            with pytest.raises(deep_ep.DeepEPError, match="begun before the Buffer recovered"):
                hook()
            low_latency_round_trip(buffer, work)
            handle = dispatch(buffer, work)[2]
            barrier(group)
            buffer.recover()
            with pytest.raises(ValueError, match="handle: expected one of a dispatch since the Buffer recovered"):
                combine(buffer, work, handle)

    run_ranks(SIZES.ranks, on_each_rank, seed=1)


@pytest.mark.parametrize("fabric", MIXED)
def test_modes_and_shapes_share_a_buffer(fabric: str) -> None:
    shapes = [
        SIZES,
        Sizes("wide", 3, (5, 5, 5), 5, 512, 2, 9),
        Sizes("long", 3, (60, 2, 33), 64, 16, 3, 3, torch.int32),
    ]
    mine = [Work.of(sizes) for sizes in shapes]

    def on_each_rank(group: Any) -> None:
        with make_buffer(group, max(shapes, key=lambda one: one.max_tokens * one.hidden), fabric) as buffer:
            for turn in range(2):
                for work in mine:
                    cast = CASTS["fp8"] if work.sizes.hidden % 128 == 0 and turn else BF16
                    low_latency_round_trip(buffer, work, cast, hooks=turn == 0)
                    round_trip(buffer, buffer.rank, NORMAL, 1)

    under_schedules(3, on_each_rank)


@pytest.mark.parametrize("fabric", MIXED)
def test_handles_are_used_again(fabric: str) -> None:
    """Also as tuples rebuilt from their elements, and with fewer choices than in the dispatch."""
    (work,) = works(3)
    rest = [torch.where(torch.arange(SIZES.topk) == 1, -1, ids) for ids in work.topk_idx]
    fewer = Work(SIZES, work.x, rest, work.weights, work.packed, work.results, work.combined)
    expected = []
    for rank in range(SIZES.ranks):
        weights = torch.where(torch.arange(SIZES.topk) == 1, 0.0, work.weights[rank])
        expected.append(weights)

    def on_each_rank(group: Any) -> None:
        with make_buffer(group, SIZES, fabric) as buffer:
            results = dispatch(buffer, work, async_finish=True)
            results[3].current_stream_wait()
            handle = results[2]
            out = torch.full(work.combined[buffer.rank].shape, torch.nan, dtype=torch.bfloat16)
            combined, event, _ = combine(buffer, work, tuple([*handle]), out=out, async_finish=True)
            event.current_stream_wait()
            assert combined is out
            check_combine(work, buffer.rank, out)
            low_latency_round_trip(buffer, Work.of(SIZES, 4))
            check_combine(work, buffer.rank, combine(buffer, work, handle)[0])
            without = combine(buffer, fewer, handle)[0]
            arguments = (work.results[buffer.rank], work.topk_idx[buffer.rank], expected[buffer.rank], handle)
            zero = buffer.low_latency_combine(*arguments)[0]
            assert torch.equal(without, zero)

    under_schedules(SIZES.ranks, on_each_rank)


@pytest.mark.parametrize("fabric", MIXED)
def test_results_are_read_where_experts_have_written_them(fabric: str) -> None:
    both = works(6, 7)

    def on_each_rank(group: Any) -> None:
        with make_buffer(group, SIZES, fabric) as buffer:
            for hooks in (False, True, True):
                handles = [dispatch(buffer, work)[2] for work in both]
                views = [buffer.get_next_low_latency_combine_buffer(handle) for handle in handles]
                assert views[0].data_ptr() != views[1].data_ptr()
                assert buffer.get_next_low_latency_combine_buffer(handles[0]) is views[0]
                ended = []
                for work, handle, view in zip(both, handles, views, strict=True):
                    view.copy_(work.results[buffer.rank])
                    elsewhere = torch.full_like(view, torch.nan)
                    options = {"zero_copy": True, "return_recv_hook": hooks}
                    ended.append(combine(buffer, work, handle, elsewhere, **options))
                if hooks:
                    with pytest.raises(deep_ep.DeepEPError, match="the hooks of 2 zero-copy combines have not been"):
                        buffer.get_next_low_latency_combine_buffer(handles[0])
                for work, view, (combined, _, hook) in zip(both, views, ended, strict=True):
                    if hooks:
                        hook()
                    view.fill_(torch.nan)  # the view belongs to the caller again
                    check_combine(work, buffer.rank, combined)

    under_schedules(SIZES.ranks, on_each_rank)


@pytest.mark.parametrize("fabric", ["peer", "mixed"])
def test_a_view_is_not_given_away_while_it_is_read(fabric: str) -> None:
    both = works(6, 7)

    def on_each_rank(group: Any) -> None:
        with make_buffer(group, SIZES, fabric) as buffer:
            handles = [dispatch(buffer, work)[2] for work in both]
            for _ in range(3):
                ended = []
                for work, handle in zip(both, handles, strict=True):
                    view = buffer.get_next_low_latency_combine_buffer(handle)
                    view.copy_(work.results[buffer.rank])
                    ended.append(combine(buffer, work, handle, view, zero_copy=True, async_finish=True))
                for work, (combined, event, _) in zip(both, ended, strict=True):
                    event.current_stream_wait()
                    check_combine(work, buffer.rank, combined)

    under_schedules(SIZES.ranks, on_each_rank)


def test_a_view_that_ranks_cannot_share_is_copied(caplog: pytest.LogCaptureFixture) -> None:
    (work,) = works(6)

    def on_each_rank(group: Any) -> None:
        with make_buffer(group, SIZES, "peer", arena_bytes=0) as buffer:
            handle = dispatch(buffer, work)[2]
            view = buffer.get_next_low_latency_combine_buffer(handle)
            view.copy_(work.results[buffer.rank])
            check_combine(work, buffer.rank, combine(buffer, work, handle, zero_copy=True)[0])

    run_ranks(SIZES.ranks, on_each_rank)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == SIZES.ranks and all("make the Buffer with a larger arena_bytes" in text for text in told)


def test_a_dropped_hook_of_published_results_breaks_the_buffer() -> None:
    """The garbage collector would determine when it runs, while other ranks wait in the order of their own hooks."""
    (work,) = works(6)

    def on_each_rank(group: Any) -> None:
        with make_buffer(group, SIZES, "peer") as buffer:
            handle = dispatch(buffer, work)[2]
            buffer.get_next_low_latency_combine_buffer(handle).copy_(work.results[buffer.rank])
            combine(buffer, work, handle, zero_copy=True, return_recv_hook=True)
            gc.collect()
            barrier(group)
            with pytest.raises(deep_ep.DeepEPError, match="the hook of a low-latency combine was dropped|broken"):
                dispatch(buffer, work)
            buffer.recover()
            low_latency_round_trip(buffer, work)

    run_ranks(SIZES.ranks, on_each_rank, seed=1)


def test_handles_that_do_not_fit() -> None:
    (work,) = works(6)

    def on_each_rank(group: Any) -> None:
        with make_buffer(group, SIZES, "peer") as buffer, make_buffer(group, SIZES, "weak") as other:
            *_, handle, _, hook = dispatch(buffer, work, return_recv_hook=True)
            with pytest.raises(ValueError, match="handle: expected one of a dispatch whose hook has been called"):
                combine(buffer, work, handle)
            hook()
            with pytest.raises(ValueError, match="handle: expected one of a Buffer that reaches the same ranks"):
                combine(other, work, handle)
            check_combine(work, buffer.rank, combine(buffer, work, handle)[0])
            low_latency_round_trip(other, work)

    run_ranks(SIZES.ranks, on_each_rank, seed=1)


def test_statistics() -> None:
    (work,) = works(5)

    def on_each_rank(group: Any) -> None:
        with make_buffer(group, SIZES, "mixed") as buffer:
            rows, waited = torch.ones(SIZES.local, dtype=torch.int32), torch.zeros(SIZES.ranks, dtype=torch.int64)
            returned = torch.zeros(SIZES.ranks, dtype=torch.int64)
            for _ in range(2):
                results = dispatch(
                    buffer, work, cumulative_local_expert_recv_stats=rows, dispatch_wait_recv_cost_stats=waited
                )
                combine(buffer, work, results[2], combine_wait_recv_cost_stats=returned)
            assert torch.equal(rows, 1 + 2 * results[1])
            assert (waited >= 0).all() and (returned >= 0).all()
            counted = buffer.stats()
            assert (counted["low_latency_dispatches"], counted["low_latency_combines"]) == (2, 2)

    run_ranks(SIZES.ranks, on_each_rank, seed=1)


@pytest.mark.parametrize("fabric", MIXED)
def test_statistics_tell_which_rank_was_late(fabric: str) -> None:
    (work,) = works(5)
    late, seconds = 1, 0.5

    def on_each_rank(group: Any) -> None:
        with make_buffer(group, SIZES, fabric) as buffer:
            received, returned = (torch.zeros(SIZES.ranks, dtype=torch.int64) for _ in range(2))
            for waited in (received, returned):
                group.barrier()
                if buffer.rank == late:
                    sleep(seconds)
                if waited is received:
                    results = dispatch(buffer, work, dispatch_wait_recv_cost_stats=received)
                else:
                    combine(buffer, work, results[2], combine_wait_recv_cost_stats=returned)
                if buffer.rank != late:
                    assert waited.argmax() == late and waited[late] > 0.9 * seconds * 1e9, waited

    run_ranks(SIZES.ranks, on_each_rank, seed=1)
