"""The ranks and how they reach each other: what all ranks agree on, and what each derives."""

from __future__ import annotations

import pytest

from deep_ep_py.device.cpu import CpuDevice
from deep_ep_py.transport.topology.topology import Topology

pytestmark = pytest.mark.once

DEVICE = CpuDevice()


def of_all(ranks: int, fabric: str | None, ranks_per_node: int | None) -> list[Topology]:
    return [Topology.of(rank, ranks, DEVICE, fabric, ranks_per_node, None) for rank in range(ranks)]


@pytest.mark.parametrize("ranks", [1, 2, 4, 6])
@pytest.mark.parametrize("fabric", DEVICE.fabrics)
@pytest.mark.parametrize("ranks_per_node", [None, 1, 2, 8])
def test_both_sides_see_the_same(ranks: int, fabric: str, ranks_per_node: int | None) -> None:
    if fabric == "ibgda" and ranks % min(ranks_per_node or 1, ranks):
        pytest.skip("refused")
    seen = of_all(ranks, fabric, ranks_per_node)
    everything = [topology.mapped for topology in seen]
    for rank, topology in enumerate(seen):
        assert topology.mapped[rank], "its own heap"
        assert topology.mapped == tuple(mapped[rank] for mapped in everything)
        assert (not topology.networks) == all(topology.mapped)
        assert topology.must_agree() == seen[0].must_agree()
        assert topology.node * topology.ranks_per_node + topology.local_rank == rank
        assert 0 <= topology.node < topology.nodes and topology.nodes * topology.ranks_per_node == ranks


def test_nodes_are_where_memory_is_shared() -> None:
    seen = of_all(6, None, 2)
    assert [(one.node, one.local_rank) for one in seen] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
        (2, 0),
        (2, 1),
    ]
    assert seen[3].mapped == (False, False, True, True, False, False)
    assert {topology.networks for topology in seen} == {("ibgda",)}


@pytest.mark.parametrize("ranks_per_node", [None, 4, 64])
def test_one_node_is_the_default(ranks_per_node: int | None) -> None:
    assert {(one.nodes, one.networks, one.mapped) for one in of_all(4, None, ranks_per_node)} == {(1, (), (True,) * 4)}


def test_nodes_of_different_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="ranks_per_node=4: expected a divisor of the 6 ranks"):
        Topology.of(0, 6, DEVICE, None, 4, None)


def test_ranks_of_several_machines_are_joined_by_the_proxy() -> None:
    machines = [0, 0, 0, 1, 1, 1]
    seen = [Topology.of(rank, 6, DEVICE, None, None, None, machines=machines) for rank in range(6)]
    assert {(one.networks, one.nodes, one.hops) for one in seen} == {(("proxy",), 2, 2)}
    assert seen[4].mapped == (False, False, False, True, True, True)


def test_nodes_that_are_parts_of_machines_are_joined_by_what_is_nearest() -> None:
    """Software NICs within a machine and the proxy between machines, or the proxy everywhere if it is named."""
    one = Topology.of(0, 4, DEVICE, None, 1, None, machines=[0, 0, 1, 1])
    assert (one.routes, one.networks) == (("peer", "ibgda", "proxy", "proxy"), ("ibgda", "proxy"))
    assert (one.nodes, one.hops) == (4, 1)
    named = Topology.of(0, 4, DEVICE, "proxy", 1, None, machines=[0, 0, 1, 1])
    assert named.routes == ("peer", "proxy", "proxy", "proxy")


@pytest.mark.parametrize(
    ("ranks_per_node", "machines", "said"),
    [
        (4, [0, 0, 1, 1], "ranks_per_node=4: expected a divisor of 2, the ranks of each machine"),
        (None, [0, 1, 0, 1], r"machines \[0, 1, 0, 1\]; expected the ranks of a machine to be consecutive"),
        (None, [0, 0, 1], "equally many on each"),
        (None, [0, 1, 1], "equally many on each"),
    ],
)
def test_what_several_machines_cannot_be(ranks_per_node: int | None, machines: list[int], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Topology.of(0, len(machines), DEVICE, None, ranks_per_node, None, machines=machines)
