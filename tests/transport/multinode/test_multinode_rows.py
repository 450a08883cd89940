"""Normal mode across several nodes against the oracle."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import deep_ep_py as deep_ep
import oracle
from fp8 import Fp8Trial
from harness import Trial, as_received, dispatch_arguments, queued_round_trip, round_trip

ROUTINGS = ("uniform", "ranks_without_tokens", "unrouted_selections", "to_one_rank")


def test_topology(world: Any, buffer: deep_ep.Buffer) -> None:
    topology, runtime = buffer._engine.topology, buffer.runtime
    node, local_rank = divmod(world.rank, world.ranks_per_node)
    assert (buffer.rank, buffer.group_size) == (world.rank, world.ranks)
    assert (topology.nodes, topology.node, topology.local_rank) == (world.nodes, node, local_rank)
    assert topology.hops == (2 if world.ranks_per_node > 1 else 1)
    assert topology.mapped == tuple(rank // world.ranks_per_node == node for rank in range(world.ranks))
    far = ["ibgda" if machine == topology.machines[world.rank] else "proxy" for machine in topology.machines]
    expected = tuple("peer" if near else path for near, path in zip(topology.mapped, far, strict=True))
    assert topology.routes == expected
    assert (runtime.get_num_rdma_ranks(), runtime.get_rdma_rank()) == (world.nodes, node)
    assert runtime.get_root_rdma_rank(True) == local_rank and runtime.is_internode_available()


@pytest.mark.parametrize("name", ROUTINGS)
def test_round_trip(name: str, world: Any, buffer: deep_ep.Buffer) -> None:
    """A layout, a dispatch and a combine with weights and biases, and then a dispatch and a combine with the handle."""
    round_trip(buffer, world.rank, world.trial(name), blocks=2)


def test_rows_cross_between_ranks_of_the_same_place_alone(world: Any, buffer: deep_ep.Buffer) -> None:
    """The place is that within the node. Software NICs count the rows; other NICs are not checked."""
    trial = world.trial("uniform")
    before = buffer.network_counters()
    trial.check_dispatch(world.rank, buffer.dispatch(**dispatch_arguments(trial.work, world.rank)))
    for peer, (was, now) in enumerate(zip(before, buffer.network_counters())):
        assert (now["bytes"] > was["bytes"]) == buffer._engine.topology.is_rail_peer(peer), (peer, was, now)


def test_one_hop_gives_the_same_rows(world: Any, buffer: deep_ep.Buffer, one_hop: deep_ep.Buffer) -> None:
    """Sums are rounded at other points, so each path has the bits of its own order."""
    assert one_hop._engine.topology.hops == 1
    straight = Trial.of(replace(world.case("uniform"), hops=1))
    received = []
    for used, trial in ((buffer, world.trial("uniform")), (one_hop, straight)):
        results = used.dispatch(**dispatch_arguments(trial.work, world.rank))
        trial.check_dispatch(world.rank, results)
        trial.check_combine(world.rank, trial.combine(used, world.rank, results[4], 2), 2)
        received.append(as_received(results))
    for part in ("x", "topk_idx", "topk_weights", "src_idx"):
        wrong = oracle.difference(part, *(getattr(results, part) for results in received))
        assert wrong is None, wrong


def test_internode_calls(world: Any, buffer: deep_ep.Buffer) -> None:
    """Calls by V1's names for several nodes, with the elements of a handle in place of the handle."""
    trial = world.trial("ranks_without_tokens")
    results = buffer.internode_dispatch(**dispatch_arguments(trial.work, world.rank))
    trial.check_dispatch(world.rank, results)
    handle, weights = tuple(results[4]), trial.expert.topk_weights[world.rank]
    combined = buffer.internode_combine(trial.expert.x[world.rank], handle, topk_weights=weights)
    trial.check_combine(world.rank, combined)
    trial.check_cached(world.rank, buffer.internode_dispatch(trial.work.x[world.rank], handle))


def test_fp8_rows_with_scales(world: Any, buffer: deep_ep.Buffer) -> None:
    Fp8Trial.of(world.case("ranks_without_tokens"), "columns", torch.int64).round_trip(buffer)


def test_num_worst_tokens(world: Any, buffer: deep_ep.Buffer) -> None:
    trial = world.trial("ranks_without_tokens")
    rows = trial.max_rows + 5
    results = buffer.dispatch(**dispatch_arguments(trial.work, world.rank, num_worst_tokens=rows))
    trial.check_worst(world.rank, results, rows)
    trial.check_combine(world.rank, buffer.combine(handle=results[4], **trial.padded(world.rank, rows)))


def test_async_finish(world: Any, buffer: deep_ep.Buffer) -> None:
    """Calls are queued one after another, and their events are waited for in reverse order."""
    queued_round_trip(buffer, world.rank, world.trial("ranks_without_tokens"), 1)
