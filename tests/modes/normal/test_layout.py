"""get_dispatch_layout: a local call that needs no peer and disturbs none."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import deep_ep_py as deep_ep
import oracle
from builds import PROTOCOL_SCHEDULES
from cases import BY_NAME, CASES, Case, build
from deep_ep_py.testing import run_ranks
from harness import Trial, make_buffer, round_trip, under_schedules


def layout_on_each_rank(group: Any, case: Case, work: oracle.Workload) -> None:
    buffer = make_buffer(group, case, "peer")
    rank = buffer.rank
    per_rank, per_rdma_rank, per_expert, in_rank, event = buffer.get_dispatch_layout(
        work.topk_idx[rank], work.num_experts
    )
    expected = oracle.layout(work.topk_idx[rank], work.num_experts, work.num_ranks)
    assert per_rdma_rank is None and isinstance(event, deep_ep.EventOverlap)
    wrong = [
        oracle.difference("num_tokens_per_rank", per_rank, expected.num_tokens_per_rank),
        oracle.difference("num_tokens_per_expert", per_expert, expected.num_tokens_per_expert),
        oracle.difference("is_token_in_rank", in_rank, expected.is_token_in_rank),
    ]
    assert not any(wrong), wrong


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_layout(case: Case) -> None:
    work = build(case)
    under_schedules(case.ranks, layout_on_each_rank, case, work, count=min(PROTOCOL_SCHEDULES, 5))


def test_many_tokens() -> None:
    """More tokens than one pass of a block handles, so the index prefix crosses blocks and passes."""
    case = Case("many", ranks=2, tokens=(5000, 1), hidden=8, topk=2, experts=8)
    run_ranks(case.ranks, layout_on_each_rank, case, build(case), seed=1)


def test_one_rank_may_ask_alone() -> None:
    """Layouts have no operation number: a rank may call it any number of times."""
    trial = Trial.of(BY_NAME["uniform"])

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, trial.case, "weak")
        for _ in range(buffer.rank):
            buffer.get_dispatch_layout(trial.work.topk_idx[buffer.rank], trial.work.num_experts)
        round_trip(buffer, buffer.rank, trial, blocks=2)

    under_schedules(trial.case.ranks, on_each_rank)


def test_inputs_are_left_alone() -> None:
    case = BY_NAME["unrouted_selections"]
    work = build(case)
    before = [idx.clone() for idx in work.topk_idx]
    run_ranks(case.ranks, layout_on_each_rank, case, work, seed=1)
    assert all(torch.equal(was, now) for was, now in zip(before, work.topk_idx))
