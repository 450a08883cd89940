"""Two-hop mode across many nodes: rows, messages and work depend on what a token needs, not on the number of ranks."""

from __future__ import annotations

from typing import Any

import pytest

import deep_ep_py as deep_ep
from builds import LONG
from cases import Case, build
from deep_ep_py.testing import run_ranks
from harness import Trial, dispatch_arguments, make_buffer, round_trip

pytestmark = [pytest.mark.once, pytest.mark.slow]


def among(nodes: int, tokens: int, **changes: Any) -> Case:
    """Return a case with nodes of 8 ranks and one expert per rank."""
    ranks = 8 * nodes
    sizes = {"hidden": 8, "experts": ranks, "num_nvl_bytes": 4 << 20, "arena_bytes": 1 << 20, "max_blocks": 2}
    return Case(f"{nodes}x8", ranks, tokens, ranks_per_node=8, **{**sizes, **changes})


@pytest.mark.parametrize(
    ("nodes", "fabric"), [(16, "ibgda"), (16, "weak"), pytest.param(32, "ibgda", marks=pytest.mark.thorough)]
)
def test_round_trip(nodes: int, fabric: str) -> None:
    trial = Trial.of(among(nodes, 2, experts=16 * nodes, cached=False))

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, trial.case, fabric)
        round_trip(buffer, buffer.rank, trial, trial.case.max_blocks)

    run_ranks(trial.case.ranks, on_each_rank, seed=1)


def turns_of_copies(nodes: int, tokens: int) -> float:
    """Return the turns of the executor per copy of a token that dispatch makes for a node."""
    case = among(nodes, tokens, topk=8, num_nvl_bytes=8 << 20)
    work = build(case)
    experts = 8 * work.experts_per_rank
    copies = sum(len({expert // experts for expert in row}) for ids in work.topk_idx for row in ids.tolist())

    def turns(calls: int) -> int:
        def on_each_rank(group: Any) -> None:
            # A request arrives in one turn of the NIC, regardless of its size.
            buffer = make_buffer(group, case, "ibgda", nic=deep_ep.NicOptions(mtu=1 << 20))
            for _ in range(calls):
                buffer.dispatch(**dispatch_arguments(work, buffer.rank))
            buffer.destroy()

        return run_ranks(case.ranks, on_each_rank, seed=1).stats["switches"]

    return (turns(1) - turns(0)) / copies


@pytest.mark.long
def test_work_of_a_copy_does_not_grow_with_ranks() -> None:
    """With 128 tokens per rank, 256 ranks against 16: measured at 1.98 and 1.95 turns per copy."""
    few, many = turns_of_copies(2, 128), turns_of_copies(32 if LONG else 8, 128)
    assert many <= 1.5 * few, (few, many)
