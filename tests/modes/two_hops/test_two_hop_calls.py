"""Guarantees of calls in two-hop mode besides their values, which the named cases test."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest
import torch

import oracle
from cases import BY_NAME, Case
from deep_ep_py import Link
from deep_ep_py.testing import run_ranks
from harness import Trial, as_received, cramped, dispatch_arguments, make_buffer, queued_round_trip, under_schedules

FABRICS = ("ibgda", "proxy")

fabrics = pytest.mark.parametrize("fabric", FABRICS)
arenas = pytest.mark.parametrize("arena_bytes", [None, 0], ids=["arena", "local_chunks"])


@fabrics
def test_one_handle_for_combines_of_all_kinds(fabric: str) -> None:
    trial = Trial.of(BY_NAME["2x2_holes"])

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, trial.case, fabric)
        rank = buffer.rank
        handle = buffer.dispatch(**dispatch_arguments(trial.work, rank))[4]
        before = [element.clone() for element in handle]
        for biases in range(3):
            for weights in (False, True):
                combined = trial.combine(buffer, rank, handle, biases, weights)
                trial.check_combine(rank, combined, biases, weights)
        assert all(torch.equal(was, now) for was, now in zip(before, handle)), "a handle must not be modified"

    under_schedules(trial.case.ranks, on_each_rank)


@fabrics
def test_without_topk(fabric: str) -> None:
    trial = Trial.of(BY_NAME["3x2_uniform"])

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, trial.case, fabric)
        rank = buffer.rank
        arguments = dispatch_arguments(trial.work, rank, topk_idx=None, topk_weights=None)
        recv_x, idx, weights, counts, handle, _ = buffer.dispatch(**arguments)
        assert idx is None and weights is None
        expected = trial.received[rank]
        assert oracle.difference("recv_x", recv_x, expected.x) is None and counts == expected.num_tokens_per_expert
        oracle.check_handle(handle, trial.handles[rank])
        trial.check_combine(rank, trial.combine(buffer, rank, handle, weights=False), weights=False)

    under_schedules(trial.case.ranks, on_each_rank)


@arenas
@fabrics
def test_other_rows_by_the_same_handle(fabric: str, arena_bytes: int | None) -> None:
    """Rows with other values and of another size."""
    trial = Trial.of(BY_NAME["2x2_uneven"])
    factors = (2, -3)

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, trial.case, fabric, arena_bytes=arena_bytes)
        rank = buffer.rank
        x, expected = trial.work.x[rank], trial.received[rank].x
        handle = buffer.dispatch(**dispatch_arguments(trial.work, rank))[4]
        rows = [buffer.dispatch(x * factor, handle=handle)[0] for factor in factors]
        narrow = buffer.dispatch(x[:, :8].contiguous(), handle=handle)[0]
        for factor, got in zip(factors, rows):
            assert oracle.difference("recv_x", got, expected * factor) is None
        assert oracle.difference("narrow", narrow, expected[:, :8]) is None

    under_schedules(trial.case.ranks, on_each_rank)


@fabrics
def test_handles_of_two_routings_take_turns(fabric: str) -> None:
    """As in the layers of a model, handles are used in the order of their creation and in reverse."""
    trials = [Trial.of(BY_NAME[name]) for name in ("2x2_uniform", "2x2_to_one_rank", "2x2_of_one_node")]

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, trials[0].case, fabric)
        rank = buffer.rank
        handles = [buffer.dispatch(**dispatch_arguments(trial.work, rank))[4] for trial in trials]
        for turn in (0, 1, 2, 2, 1, 0):
            trial = trials[turn]
            trial.check_cached(rank, buffer.dispatch(trial.work.x[rank], handle=handles[turn]))
            trial.check_combine(rank, trial.combine(buffer, rank, handles[turn]))

    under_schedules(trials[0].case.ranks, on_each_rank)


@arenas
@fabrics
def test_inputs_may_change_once_it_has_returned(fabric: str, arena_bytes: int | None) -> None:
    """Neither the NIC of their owner nor a forwarder still reads them."""
    trial = Trial.of(BY_NAME["2x2_uniform"])

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, trial.case, fabric, arena_bytes=arena_bytes)
        rank = buffer.rank
        arguments = dispatch_arguments(trial.work, rank)
        arguments |= {name: arguments[name].clone() for name in ("x", "topk_idx", "topk_weights")}
        results = buffer.dispatch(**arguments)
        for name in ("x", "topk_idx", "topk_weights"):
            arguments[name].zero_()
        trial.check_dispatch(rank, results)
        x = trial.expert.x[rank].clone()
        combined = buffer.combine(x, results[4], topk_weights=trial.expert.topk_weights[rank])
        x.zero_()
        trial.check_combine(rank, combined)

    under_schedules(trial.case.ranks, on_each_rank)


@arenas
@fabrics
def test_async_finish(fabric: str, arena_bytes: int | None) -> None:
    """Calls are queued one after another; results are complete once their event has been waited for."""
    trial = Trial.of(BY_NAME["3x2_uniform"])

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, trial.case, fabric, arena_bytes=arena_bytes)
        queued_round_trip(buffer, buffer.rank, trial, 2)

    under_schedules(trial.case.ranks, on_each_rank)


@arenas
@fabrics
def test_operations_finish_in_any_order(fabric: str, arena_bytes: int | None) -> None:
    """Two overlapping micro-batches: both are open at once and finished in either order, with a combine and a cached
    dispatch in between. Each has more chunks than slots."""
    shape = Case("open", 4, 0, topk=2, experts=8, ranks_per_node=2, arena_bytes=arena_bytes)
    shapes = [replace(shape, tokens=(9, 0, 14, 5), hidden=8), replace(shape, tokens=(0, 16, 3, 7), hidden=16)]
    trials = [Trial.of(case, seed) for seed, case in enumerate(shapes)]
    # Room for the larger rows in each region.
    roomy = cramped(shapes[1], fabric, 1.0, regions=4)

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, roomy, fabric, regions=4)
        rank = buffer.rank
        handle = buffer.dispatch(**dispatch_arguments(trials[0].work, rank))[4]
        for order in permutations(range(2)):
            pending = [
                buffer._begin_dispatch(**dispatch_arguments(trial.work, rank), finish_later=True) for trial in trials
            ]
            trials[0].check_combine(rank, trials[0].combine(buffer, rank, handle))
            results = {order[0]: pending[order[0]].finish()}
            trials[0].check_cached(rank, buffer.dispatch(trials[0].work.x[rank], handle=handle))
            results[order[1]] = pending[order[1]].finish()
            for n in order:
                trials[n].check_dispatch(rank, results[n])
            for n in reversed(order):
                trials[n].check_combine(rank, trials[n].combine(buffer, rank, results[n][4]))
            handle = results[0][4]

    under_schedules(shape.ranks, on_each_rank)


@fabrics
def test_two_buffers_side_by_side(fabric: str) -> None:
    """Operations of both are in flight at once."""
    trials = [Trial.of(BY_NAME["2x2_uniform"], seed) for seed in (1, 2)]

    def on_each_rank(group: Any) -> None:
        buffers = [make_buffer(group, trial.case, fabric) for trial in trials]
        rank = buffers[0].rank
        pending = [
            buffer._begin_dispatch(**dispatch_arguments(trial.work, rank), finish_later=True)
            for buffer, trial in zip(buffers, trials)
        ]
        results = [one.finish() for one in reversed(pending)][::-1]
        queued = [
            trial.combine(buffer, rank, result[4], async_finish=True)
            for buffer, trial, result in zip(buffers, trials, results)
        ]
        for trial, result, combined in zip(trials, results, queued):
            trial.check_dispatch(rank, result)
            combined[2].current_stream_wait()
            trial.check_combine(rank, combined)

    under_schedules(trials[0].case.ranks, on_each_rank)


@arenas
def test_outputs_outlive_the_buffer(arena_bytes: int | None) -> None:
    trial = Trial.of(BY_NAME["2x2_uniform"])

    def on_each_rank(group: Any) -> Any:
        buffer = make_buffer(group, trial.case, "ibgda", arena_bytes=arena_bytes)
        return as_received(buffer.dispatch(**dispatch_arguments(trial.work, buffer.rank)))

    for rank, received in enumerate(run_ranks(trial.case.ranks, on_each_rank, seed=1)):
        oracle.check_received(received, trial.received[rank])


@pytest.mark.once
def test_arguments() -> None:
    case = Case("arguments", 4, 0, ranks_per_node=2)

    def on_each_rank(group: Any, hops: Any) -> None:
        make_buffer(group, case, "ibgda", hops=hops(group.rank()))

    for wrong in (0, 3, -1):
        with pytest.raises(ValueError, match=rf"hops={wrong}"):
            run_ranks(4, on_each_rank, lambda rank, wrong=wrong: wrong)
    with pytest.raises(ValueError, match=r"hops=.*expected the same on all ranks"):
        run_ranks(4, on_each_rank, lambda rank: 1 + rank % 2)


@pytest.mark.once
@pytest.mark.parametrize("options", [{"hops": 1}, {"low_latency_mode": True}], ids=["one_hop", "low_latency"])
def test_what_rails_do_not_carry(options: dict[str, Any]) -> None:
    case = Case("arguments", 4, 0, ranks_per_node=2)
    expected = "hops=2" if "hops" in options else "low_latency_mode=False"

    def on_each_rank(group: Any, link: Link, **options: Any) -> None:
        make_buffer(group, case, "ibgda", link=link, **options).destroy()

    with pytest.raises(ValueError, match=rf"link.rails=True: expected {expected}"):
        run_ranks(4, on_each_rank, Link(rails=True), **options)
    run_ranks(4, on_each_rank, Link(), **options)
    with pytest.raises(TypeError, match=r"link.rails='yes': expected a bool"):
        Link(rails="yes")  # type: ignore[arg-type]
