"""The part of a test that runs on each rank, on a GPU or on its stand-in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

import deep_ep_py as deep_ep
from cases import BY_NAME, CASES, Case
from deep_ep_py.testing import run_ranks
from harness import RETRIES_EXCEEDED, Trial, dispatch_arguments, failing, make_buffer, round_trip

BLOCKS = (1, 2, 5)
# Run again as several nodes, with so many ranks per node: requests to NICs, which host threads carry out in pinned
# memory, and commands to proxies, which are host threads too.
FABRICS = ("ibgda", "proxy")
BETWEEN_NODES = [
    replace(BY_NAME[name], name=f"{name}-{ranks_per_node}", ranks_per_node=ranks_per_node)
    for name in ("two_ranks", "uniform", "uneven_tokens", "skewed", "rounds_without_arena", "topk_8_of_8_ranks")
    for ranks_per_node in (1, 2)
    if ranks_per_node < BY_NAME[name].ranks
]


def make_warm(group: Any, case: Case, fabric: str = "peer", **options: Any) -> deep_ep.Buffer:
    """Make a Buffer that has nothing left to load: loading may wait for another rank's kernels."""
    options = {"timeout": 20.0, **options}
    buffer = make_buffer(group, case, fabric, device="cuda", **options)
    buffer.warmup(case.hidden, case.topk)
    return buffer


def on_each_rank(group: Any, trial: Trial, **options: Any) -> None:
    buffer = make_warm(group, trial.case, **options)
    assert buffer.stats()["through_host"] == 0
    for blocks in BLOCKS:
        round_trip(buffer, buffer.rank, trial, min(blocks, trial.case.max_blocks))
    buffer.destroy()


def on_each_node(group: Any, trial: Trial, fabric: str) -> None:
    """The same between nodes; check what the NICs or proxies have counted."""
    buffer, per_node = make_warm(group, trial.case, fabric), trial.case.ranks_per_node
    assert buffer.stats()["through_host"] == 1
    for blocks in BLOCKS:
        round_trip(buffer, buffer.rank, trial, min(blocks, trial.case.max_blocks))
    assert buffer.runtime.settle(20.0)
    buffer.runtime.drain()
    for peer, sent in enumerate(buffer.network_counters()):
        # With two hops, only ranks at the same position in their nodes send to each other.
        far = peer // per_node != buffer.rank // per_node
        far = far and (peer % per_node == buffer.rank % per_node or not trial.case.two_hops)
        by_nic = far and fabric == "ibgda"
        assert bool(sent["writes"]) == far and bool(sent["atomics"]) == bool(sent["doorbells"]) == by_nic, (peer, sent)
        assert sent["doorbells"] <= sent["atomics"], (peer, sent)
    buffer.destroy()


def run_named_cases(max_ranks: int, names: Sequence[str], **how: Any) -> None:
    """Run the named cases, or all, by `run_ranks`, and print each name; cases between nodes run on every fabric."""
    for case in CASES:
        if case.fabric in (None, "peer") and case.ranks <= max_ranks and (not names or case.name in names):
            run_ranks(case.ranks, on_each_rank, Trial.of(case), **how)
            print(case.name)
    for fabric in FABRICS:
        for case in BETWEEN_NODES:
            if not names or case.name in names:
                run_ranks(case.ranks, on_each_node, Trial.of(case), fabric, **how)
                print(case.name)


def link_that_fails(group: Any, trial: Trial, fabric: str) -> str:
    """Return the error that the rank raises within some rounds, where rank 1 fails to send to rank 2."""
    buffer = make_warm(group, trial.case, fabric, nic=failing(1, 2, 40, RETRIES_EXCEEDED))
    rank = buffer.rank
    given = {name: value.to(buffer.device) for name, value in dispatch_arguments(trial.work, rank).items()}
    expert = (trial.expert.x[rank].to(buffer.device), trial.expert.topk_weights[rank].to(buffer.device))

    def ended_well() -> None:
        assert buffer.runtime.settle(20.0)
        buffer.stats()  # raises the kernels' failures

    with pytest.raises(deep_ep.DeepEPError) as info:
        for _ in range(20):
            results = buffer.dispatch(**given)
            ended_well()
            trial.check_dispatch(rank, results)
            combined = buffer.combine(expert[0], results[4], topk_weights=expert[1])
            ended_well()
            trial.check_combine(rank, combined)
    with pytest.raises(deep_ep.DeepEPError, match="the Buffer is broken"):
        buffer.dispatch(**given)
    return str(info.value)


def check_what_a_failing_link_says(said: list[str], fabric: str) -> None:
    own = {"ibgda": "the NIC reports an error of work request", "proxy": "the proxy cannot send"}[fabric]
    for rank, message in enumerate(said):
        if rank == 1:
            assert own in message and "to rank 2" in message, message
        else:
            assert "because rank 1 was told by its NIC that it cannot send to rank 2" in message, message
