"""Two-hop mode against the oracle: every named case with several nodes, chunks of a few rows, arenas that only some
ranks have, the order of summation. Under random schedules, over both fabrics that join nodes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import deep_ep_py as deep_ep
import oracle
from builds import BLOCK_COUNTS, PROTOCOL_SCHEDULES, SANITIZED, SCHEDULES, schedules
from cases import BY_NAME, ROUTED_IN_TWO_HOPS, Case
from deep_ep_py.testing import run_ranks
from harness import MANY_RANKS, Trial, cramped, dispatch_arguments, make_buffer, round_trip, under_schedules

FABRICS = ("ibgda", "proxy")


def on_each_rank(group: Any, trial: Trial, fabric: str) -> None:
    buffer = make_buffer(group, trial.case, fabric)
    for blocks in sorted({min(blocks, trial.case.max_blocks) for blocks in BLOCK_COUNTS}):
        round_trip(buffer, buffer.rank, trial, blocks)


@pytest.mark.parametrize("fabric", FABRICS)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=[pytest.mark.once] if case.ranks > MANY_RANKS else [])
        for case in ROUTED_IN_TWO_HOPS
    ],
)
def test_case(case: Case, fabric: str) -> None:
    # Larger cases get fewer schedules: small cases cover routings, large ones cover numbers of nodes and ranks.
    few = {4: SCHEDULES, 8: max(1, SCHEDULES // 2), MANY_RANKS: max(1, SCHEDULES // 4)}
    count = next((few[ranks] for ranks in few if case.ranks <= ranks), 1)
    under_schedules(case.ranks, on_each_rank, Trial.of(case), fabric, count=count)


@pytest.mark.parametrize("fabric", FABRICS)
def test_a_schedule_replays(fabric: str) -> None:
    trial = Trial.of(BY_NAME["2x2_uniform"])

    def events(seed: int) -> int:
        return run_ranks(trial.case.ranks, on_each_rank, trial, fabric, seed=seed).event_hash

    first = [events(seed) for seed in schedules(3)]
    assert first == [events(seed) for seed in schedules(3)]
    assert len(set(first)) == 3


# --- chunks ---------------------------------------------------------------------------------------------------------

# Row streams of very different lengths. The bytes, in units of the minimum, allow chunks of one to three rows.
CHUNKED = [
    (Case("2x2", 4, (41, 0, 13, 25), hidden=8, topk=3, experts=8, ranks_per_node=2), 1.0),
    (Case("3x2", 6, (17, 3, 0, 30, 9, 14), hidden=8, topk=4, experts=12, ranks_per_node=2), 1.7),
    (Case("2x4", 8, (3, 0, 22, 9, 1, 31, 12, 0), hidden=8, topk=4, routing="skewed", ranks_per_node=4), 2.5),
]
chunked = pytest.mark.parametrize(("case", "times"), CHUNKED, ids=[case.name for case, _ in CHUNKED])


def in_chunks(group: Any, trial: Trial, fabric: str) -> None:
    buffer = make_buffer(group, trial.case, fabric)
    for blocks in BLOCK_COUNTS[:2]:
        round_trip(buffer, buffer.rank, trial, blocks)


@pytest.mark.parametrize("arena_bytes", [None, 0], ids=["arena", "local_chunks"])
@pytest.mark.parametrize("fabric", FABRICS)
@chunked
def test_many_chunks(case: Case, times: float, fabric: str, arena_bytes: int | None) -> None:
    """A row stream has more chunks than slots, also in the local hop if no output is in an arena."""
    trial = Trial.of(replace(cramped(case, fabric, times), arena_bytes=arena_bytes))
    under_schedules(case.ranks, in_chunks, trial, fabric)


@pytest.mark.parametrize("fabric", FABRICS)
def test_arenas_that_are_full_on_some_ranks(fabric: str) -> None:
    """A forwarder stores into some outputs of its node and makes chunks for others; in combine it loads from some and
    gets chunks from others. On one node the arena of the first rank is full, on the other all but that one."""
    case = Case("full", 6, 14, topk=3, experts=12, ranks_per_node=3, arena_bytes=1 << 15)
    trial = Trial.of(cramped(case, fabric, 1.7))

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, trial.case, fabric)
        rank = buffer.rank
        full, config = rank in (0, 4, 5), deep_ep.Config(num_sms=2)
        kept = []
        for number in range(7):
            before = buffer.stats()["arena_used"]
            results = buffer.dispatch(**dispatch_arguments(trial.work, rank, config=config))
            trial.check_dispatch(rank, results)
            outside = buffer.stats()["arena_used"] - before < results[0].nbytes
            assert outside == full or number < 6, "the case no longer mixes full and free arenas"
            trial.check_combine(rank, trial.combine(buffer, rank, results[4], config=config))
            if full:
                kept.append(results)
            del results
        for results in kept:
            trial.check_dispatch(rank, results)

    under_schedules(case.ranks, on_each_rank, count=max(1, PROTOCOL_SCHEDULES // 2))


# --- the order of summation -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("arena_bytes", [None, 0], ids=["arena", "local_chunks"])
@pytest.mark.parametrize("fabric", FABRICS)
def test_sums_are_the_same_under_every_schedule(fabric: str, arena_bytes: int | None) -> None:
    """Magnitudes of rows differ so much that another order of summation, or another number of roundings, gives other
    bits."""
    case = Case(
        "order", 6, 5, topk=6, experts=6, routing="everywhere", ranks_per_node=3, arena_bytes=arena_bytes, cached=False
    )
    trial, tokens = Trial.of(case), [5] * case.ranks
    rows = [x.clone() for x in trial.expert.x]
    for first in (0, 3):
        # Half of the elements: the first two cancel, so the loss of the third depends on its position.
        rows[first][:, :32] *= 2.0**20
        rows[first + 1][:, :32] = -rows[first][:, :32]
    weights = trial.expert.topk_weights
    expected = oracle.combine(trial.received, tokens, rows, weights, ranks_per_node=3)
    turned = [2, 1, 0, 5, 4, 3]
    of_turned = [[each[rank] for rank in turned] for each in (trial.received, rows, weights)]
    others = {
        "one hop": oracle.combine(trial.received, tokens, rows, weights),
        "from the last rank of a node to the first": oracle.combine(
            of_turned[0], tokens, of_turned[1], of_turned[2], ranks_per_node=3
        ),
    }
    for name, other in others.items():
        shows = [not oracle.same_bits(wrong.x, own.x) for wrong, own in zip(other, expected)]
        assert all(shows), f"the case no longer distinguishes orders: {name} gives the same bits"

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, case, fabric)
        rank = buffer.rank
        handle = buffer.dispatch(**dispatch_arguments(trial.work, rank))[4]
        for blocks in BLOCK_COUNTS:
            config = deep_ep.Config(num_sms=blocks)
            x, sums, _ = buffer.combine(rows[rank], handle, topk_weights=weights[rank], config=config)
            oracle.check_combined(x, sums, expected[rank])

    count = PROTOCOL_SCHEDULES if SANITIZED else 5 * PROTOCOL_SCHEDULES
    under_schedules(case.ranks, on_each_rank, count=count)


def test_special_values() -> None:
    """Node sums that overflow BF16, denormals, infinities, NaN and -0 follow fp32 arithmetic and the roundings."""
    case = Case("special", 4, 8, topk=4, experts=4, routing="everywhere", ranks_per_node=2)
    trial = Trial.of(case)
    values = torch.tensor([0.0, -0.0, 3.3895e38, -3.3895e38, 1e-40, -1e-40, 1e-38, float("inf"), float("-inf"), 1.0])
    random = torch.Generator().manual_seed(3)
    rows = [values[torch.randint(10, x.shape, generator=random)].to(torch.bfloat16) for x in trial.expert.x]
    weights = trial.expert.topk_weights
    expected = oracle.combine(trial.received, [8] * 4, rows, weights, ranks_per_node=2)

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, case, "ibgda")
        rank = buffer.rank
        handle = buffer.dispatch(**dispatch_arguments(trial.work, rank))[4]
        x, wanted = buffer.combine(rows[rank], handle)[0], expected[rank].x
        nan, zero = wanted.isnan(), torch.zeros((), dtype=torch.bfloat16)
        assert nan.any() and wanted.isinf().any(), "the case no longer covers special values"
        assert torch.equal(x.isnan(), nan)
        assert oracle.same_bits(x.where(~nan, zero), wanted.where(~nan, zero))

    run_ranks(case.ranks, on_each_rank, seed=1)
