"""Dispatch and combine through `ElasticBuffer`: both layouts, with and without a host wait, anew and by handle."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any

import pytest
import torch

import deep_ep_py as deep_ep
import oracle
from builds import BLOCK_COUNTS, FABRICS
from cases import BY_NAME
from deep_ep_py.testing import run_ranks
from elastic import ElasticTrial, round_trip
from harness import under_schedules

NAMES = (
    "uniform",
    "one_rank_alone",
    "three_ranks",
    "all_to_one_rank",
    "ranks_that_send_nothing",
    "no_tokens_at_all",
    "unrouted_selections",
    "nothing_routed",
    "several_experts_on_one_rank",
    "hidden_of_one_piece",
    "topk_32",
    "rounds_without_arena",
    "2x2_uniform",
    "2x2_to_one_node",
    "2x3_holes",
)
TRIALS = {name: ElasticTrial.of(BY_NAME[name], alignment) for name, alignment in zip(NAMES, (1, 8, 3) * 5, strict=True)}


def with_fabrics(names: Iterable[str]) -> list[tuple[str, str]]:
    """Combine trials with fabrics; where peers are mapped, all ranks share a node."""
    return [
        (name, fabric) for name in names for fabric in FABRICS if fabric != "peer" or not TRIALS[name].case.two_hops
    ]


@pytest.mark.covers
@pytest.mark.parametrize(("name", "fabric"), with_fabrics(TRIALS))
def test_round_trip(name: str, fabric: str) -> None:
    trial = TRIALS[name]

    def on_each_rank(group: Any) -> None:
        with trial.make_buffer(group, fabric) as buffer:
            for number, (expanded, exact) in enumerate([(True, True), (False, False), (True, False), (False, True)]):
                blocks = BLOCK_COUNTS[number % len(BLOCK_COUNTS)]
                round_trip(buffer, trial, blocks, expanded=expanded, exact=exact)

    under_schedules(trial.case.ranks, on_each_rank)


@pytest.mark.parametrize("choice", ["senders", "receiver"])
def test_who_expands(choice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Senders, where they reach the layout and the host waits for its size: each is checked against the same oracle."""
    monkeypatch.setenv("DEEP_EP_EXPAND", choice)
    trial = TRIALS["several_experts_on_one_rank"]

    def on_each_rank(group: Any) -> None:
        for fabric in ("peer", "weak", "ibgda"):
            with trial.make_buffer(group, fabric) as buffer:
                found = []
                for exact in (True, False):
                    before = buffer.stats()["expanded_by_senders"]
                    round_trip(buffer, trial, 2, expanded=True, exact=exact)
                    found.append(buffer.stats()["expanded_by_senders"] - before)
                assert found == [int(choice == "senders" and fabric == "peer"), 0], fabric

    under_schedules(trial.case.ranks, on_each_rank)


def test_ranks_that_expand_differently() -> None:
    trial = TRIALS["several_experts_on_one_rank"]

    def on_each_rank(group: Any) -> None:
        mismatch = pytest.raises(deep_ep.DeepEPError, match="do_expand or DEEP_EP_EXPAND")
        with trial.make_buffer(group, "peer") as buffer, mismatch:
            trial.dispatch(buffer, buffer.rank_idx, do_expand=buffer.rank_idx != 1)

    run_ranks(trial.case.ranks, on_each_rank)


ONE_BY_ONE = (
    "three_ranks",
    "ranks_that_send_nothing",
    "no_tokens_at_all",
    "unrouted_selections",
    "nothing_routed",
    "several_experts_on_one_rank",
    "topk_32",
    "rounds_without_arena",
    "2x2_uniform",
    "2x3_holes",
)


@pytest.mark.covers
@pytest.mark.parametrize(("name", "fabric"), with_fabrics(ONE_BY_ONE))
def test_rows_that_return_one_by_one(name: str, fabric: str) -> None:
    """Nothing sums the expanded rows on their way, so that the sums are rounded once; in two hops too."""
    trial = TRIALS[name]

    def on_each_rank(group: Any) -> None:
        with trial.make_buffer(group, fabric, allow_multiple_reduction=False) as buffer:
            for blocks, exact in zip(BLOCK_COUNTS, (True, False), strict=False):
                round_trip(buffer, trial, blocks, expanded=True, exact=exact)
            round_trip(buffer, trial, BLOCK_COUNTS[0], expanded=False, exact=True)

    under_schedules(trial.case.ranks, on_each_rank)


def test_sums_in_flight_without_their_handle() -> None:
    """A combine keeps what its kernels read, even if its caller drops the handle and uses other memory meanwhile."""
    trial = TRIALS["several_experts_on_one_rank"]

    def on_each_rank(group: Any) -> None:
        with trial.make_buffer(group, "peer", allow_multiple_reduction=False) as buffer:
            rank = buffer.rank_idx
            handle = trial.dispatch(buffer, rank, do_expand=True).handle
            combined = trial.combine(buffer, rank, handle, 2, async_with_compute_stream=True)
            size = handle.one_by_one.sums.slots.numel()
            del handle
            gc.collect()
            others = [torch.full((size,), 7, dtype=torch.int32) for _ in range(64)]
            combined.event.current_stream_wait()
            trial.check_combine(rank, combined, 2, one_by_one=True)
            assert all((one == 7).all() for one in others), "kernels write into none of it either"

    under_schedules(trial.case.ranks, on_each_rank)


def test_a_layout_leaves_room_for_rows_that_pass_through() -> None:
    """Kept outputs take no more of the memory that peers reach than lets later calls go without rounds."""
    trial = TRIALS["uniform"]

    def on_each_rank(group: Any) -> None:
        rank, kept = group.rank(), []
        with trial.make_buffer(group, "peer", arena_bytes=1 << 16) as buffer:
            for _ in range(40):
                received = trial.dispatch(buffer, rank, do_expand=True)
                trial.check_combine(rank, trial.combine(buffer, rank, received.handle))
                kept.append(received)
            assert 0 < buffer.stats()["expanded_by_senders"] < 40

    under_schedules(trial.case.ranks, on_each_rank, count=1)


@pytest.mark.parametrize("fabric", FABRICS)
def test_padding_is_zeroed(fabric: str) -> None:
    trial = ElasticTrial.of(BY_NAME["several_experts_on_one_rank"], alignment=8)

    def on_each_rank(group: Any) -> None:
        with trial.make_buffer(group, fabric) as buffer:
            rank = buffer.rank_idx
            x, _, weights, handle, _ = trial.dispatch(buffer, rank, do_expand=True, do_zero_padding=True)
            again = buffer.dispatch(
                trial.work.x[rank],
                handle=handle,
                topk_weights=trial.work.topk_weights[rank],
                do_expand=True,
                do_zero_padding=True,
            )
            padding = trial.layouts[rank].padding()
            assert padding
            for rows, of_rows in ((x, weights), (again.recv_x, again.recv_topk_weights)):
                assert not rows[padding].any() and not of_rows[padding].any()

    under_schedules(trial.case.ranks, on_each_rank)


@pytest.mark.parametrize("expanded", [False, True], ids=["rows", "expanded"])
def test_without_weights(expanded: bool) -> None:
    """Ids travel without weights, as in a backward pass."""
    trial = TRIALS["unrouted_selections"]

    def on_each_rank(group: Any, fabric: str) -> None:
        with trial.make_buffer(group, fabric) as buffer:
            results = trial.dispatch(buffer, buffer.rank_idx, topk_weights=None, do_expand=expanded)
            trial.check(buffer.rank_idx, results, expanded=expanded, exact=True, weighted=False)

    for fabric in FABRICS:
        under_schedules(trial.case.ranks, on_each_rank, fabric, count=1)


def test_the_rows_of_an_expanded_handle_without_its_layout() -> None:
    trial = TRIALS["several_experts_on_one_rank"]

    def on_each_rank(group: Any) -> None:
        with trial.make_buffer(group, "peer") as buffer:
            rank = buffer.rank_idx
            handle = trial.dispatch(buffer, rank, do_expand=True).handle
            again = buffer.dispatch(trial.work.x[rank], handle=handle)
            assert oracle.same_bits(again.recv_x, trial.received[rank].x)
            assert oracle.same_bits(again.recv_topk_idx, trial.received[rank].topk_idx)

    under_schedules(trial.case.ranks, on_each_rank)


@pytest.mark.parametrize(("name", "fabric"), with_fabrics(("several_experts_on_one_rank", "2x3_holes")))
def test_each_weight_comes_from_the_rank_of_its_choice(name: str, fabric: str) -> None:
    """What other ranks have in that column does not matter, nor what has become of `recv_topk_idx` since."""
    trial = TRIALS[name]
    ids = trial.work.topk_idx
    # Every rank returns other weights, as the gradients of its rows' weights are.
    expected = [torch.where(own >= 0, 10.0 * (own // trial.work.experts_per_rank) + 1, 0.0) for own in ids]

    def on_each_rank(group: Any) -> None:
        with trial.make_buffer(group, fabric) as buffer:
            rank = buffer.rank_idx
            for exact in (True, False):
                received = trial.dispatch(buffer, rank, do_cpu_sync=exact)
                weights = torch.full_like(received.recv_topk_weights, 10.0 * rank + 1)
                received.recv_topk_idx.zero_()
                combined = trial.combine(buffer, rank, received.handle, weights=weights)
                assert oracle.same_bits(combined[1], expected[rank])

    under_schedules(trial.case.ranks, on_each_rank)


def test_statistics_add_up() -> None:
    trial = ElasticTrial.of(BY_NAME["uniform"], alignment=8)

    def on_each_rank(group: Any) -> None:
        with trial.make_buffer(group, "peer") as buffer:
            rank = buffer.rank_idx
            counts = [len(rows) for rows in trial.layouts[rank].rows]
            statistics = torch.full((len(counts),), 5, dtype=torch.int32)
            for _ in range(2):
                handle = trial.dispatch(buffer, rank, cumulative_local_expert_recv_stats=statistics).handle
            buffer.dispatch(trial.work.x[rank], handle=handle, cumulative_local_expert_recv_stats=statistics)
            assert statistics.tolist() == [5 + 2 * count for count in counts], "with a handle nothing is counted again"

    under_schedules(trial.case.ranks, on_each_rank)


def test_the_handle_keeps_the_choices() -> None:
    trial = TRIALS["uniform"]

    def on_each_rank(group: Any) -> None:
        with trial.make_buffer(group, "peer") as buffer:
            rank = buffer.rank_idx
            ids = trial.work.topk_idx[rank].clone()
            copied = buffer.dispatch(trial.work.x[rank], ids, num_experts=trial.work.num_experts).handle
            shared = buffer.dispatch(
                trial.work.x[rank], ids, num_experts=trial.work.num_experts, do_handle_copy=False
            ).handle
            assert copied.topk_idx.data_ptr() != ids.data_ptr() == shared.topk_idx.data_ptr()
            ids.fill_(-1)
            trial.check_combine(rank, trial.combine(buffer, rank, copied, 2), 2)

    under_schedules(trial.case.ranks, on_each_rank)


def test_in_flight_and_in_order() -> None:
    """Events of a dispatch and a combine in flight at once, waited for in reverse order."""
    trial = TRIALS["uniform"]

    def on_each_rank(group: Any) -> None:
        with trial.make_buffer(group, "peer") as buffer:
            rank = buffer.rank_idx
            options = {"async_with_compute_stream": True, "allocate_on_comm_stream": True}
            first = trial.dispatch(
                buffer,
                rank,
                do_expand=True,
                previous_event=buffer.capture(),
                previous_event_before_epilogue=buffer.capture(),
                **options,
            )
            combined = trial.combine(buffer, rank, first.handle, 1, previous_event=first.event, **options)
            combined.event.current_stream_wait()
            trial.check_combine(rank, combined, 1)
            first.event.current_stream_wait()
            trial.check(rank, first, expanded=True, exact=True)
            buffer.barrier()

    under_schedules(trial.case.ranks, on_each_rank)
