"""Computes a placement of experts from their loads. Start reading at `plan`."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from deep_ep_py.base import arguments
from deep_ep_py.eplb.greedy import Floats, Ints, pack, per_replica, replicate
from deep_ep_py.eplb.loads import checked_loads
from deep_ep_py.eplb.placement import Placement, checked_ranks


def plan(
    loads: Tensor,
    *,
    num_physical_experts: int,
    num_ranks: int,
    num_nodes: int = 1,
    num_groups: int = 1,
    masked_ranks: Iterable[int] = (),
) -> Placement:
    """Place the replicas of all experts on ranks so that the ranks get equally many tokens.

    The method is that of DeepSeek's Expert Parallelism Load Balancer (the repository deepseek-ai/EPLB), except that no
    rank gets two replicas of an expert, which would only share what one of them gets alone. A plan equals EPLB's only
    where that one has none either. Layers are planned independently, in three steps:

    1. Groups of experts are packed onto nodes, as evenly as their loads allow. A router that limits the groups of a
       token then limits the nodes to which its rows go.
    2. In each node, one redundant replica at a time is given to the expert with the highest load per replica, among
       those that have fewer replicas than the node has ranks.
    3. In each node, the replicas are packed onto ranks, as evenly as their loads allow.

    If the number of groups is not a multiple of the number of nodes, groups cannot be packed: then all ranks count as
    one node of a single group, and the replicas of an expert can be on any nodes (EPLB's global policy).

    If a rank has more places than its node has experts, pairs cannot be avoided. Then each rank holds every expert of
    its node, and the first of them in the remaining places too.

    Packing takes the heaviest item first, and puts it where the load is least among the places with room. If each place
    has room for one item only, no choice is more even than another, and the items keep their order. A replica whose
    expert is there already goes to the least loaded of the other ranks with room. If all of these have its expert, it
    takes the place of another replica, on a rank that is full, and that replica goes to the least loaded rank with
    room. Where either was necessary, replicas are swapped at the end, as long as that relieves the rank with the
    highest load, but at most once per rank.

    The result is a function of the arguments alone, since ties are resolved by order:

    * Of groups with equal loads, the lower is packed first. Of nodes, and of ranks, with equal loads, the lower
      receives the next item.
    * The experts of a node are in the order in which their groups were packed, then of their ids. Of experts with equal
      loads per replica, the first in this order gets the next redundant replica.
    * Of replicas with equal loads, the first replicas of experts are packed first, in the order of experts, then the
      redundant ones, in the order in which they were given.

    EPLB sorts with `torch.sort`, which may order equal items differently on different CPUs; with `stable=True` there,
    its results have these rules too. As there, loads are compared, divided and added in float32, so loads that differ
    by less than about 1e-7 of their value can count as equal.

    An expert without tokens gets redundant replicas only if all experts of its node that have tokens are on every rank.
    Then the first one gets them, until it is on every rank too. So pass equal loads, such as ones, for a layer without
    statistics.

    Parameters
    ----------
    loads : torch.Tensor
        [layers, logical experts], or [logical experts] for one layer: tokens that each logical expert has received, in
        any unit that is the same within a layer. Of an integer or floating-point dtype and on any device, from which it
        is copied to the CPU. `physical_to_logical` makes such loads from the counts of a dispatch. All ranks must pass
        the same loads to get the same plan.
    num_physical_experts : int
        Number of replicas of all experts in a layer together: a multiple of `num_ranks`, and at least the number of
        logical experts.
    num_ranks : int
        Number of ranks; a multiple of `num_nodes`.
    num_nodes : int
        Number of nodes. Ranks of a node are consecutive.
    num_groups : int
        Number of groups of a group-limited router; a divisor of the number of logical experts. Experts of a group are
        consecutive.
    masked_ranks : iterable of int
        Ranks that get no experts, such as `Buffer.masked_ranks` after a recovery. Their places keep their ids, and
        count in `num_physical_experts`; those of the other ranks must suffice for all experts. If there are any, the
        other ranks count as one node of a single group.

    Returns
    -------
    Placement
        With maps on the CPU. An expert's entries in `logical_to_physical_map` are in the order in which its replicas
        were created.

    Raises
    ------
    TypeError, ValueError
        An argument is invalid; the message names it.
    """
    checked = checked_loads(loads)
    experts = checked.shape[1]
    arguments.integer("num_ranks", num_ranks, 1, arguments.MAX_RANKS)
    arguments.integer("num_nodes", num_nodes, 1, num_ranks)
    if num_ranks % num_nodes:
        raise ValueError(f"num_nodes={num_nodes}: expected a divisor of the {num_ranks} ranks")
    arguments.integer("num_groups", num_groups, 1, experts)
    if experts % num_groups:
        raise ValueError(f"num_groups={num_groups}: expected a divisor of the {experts} logical experts")
    arguments.experts(num_physical_experts, num_ranks, "num_physical_experts")
    masked = checked_ranks("masked_ranks", masked_ranks, num_ranks)
    ranks = [rank for rank in range(num_ranks) if rank not in masked]
    places = num_physical_experts // num_ranks * len(ranks)
    if places < experts:
        without = f", of which {places} are on the ranks other than {masked}" if masked else ""
        raise ValueError(
            f"num_physical_experts={num_physical_experts}{without}: expected at least {experts}, as in loads"
        )
    if masked or num_groups % num_nodes:
        num_groups = num_nodes = 1
    planned = _plan(checked.numpy(), places, len(ranks), num_nodes, num_groups)
    return _on_ranks(planned, ranks, num_ranks) if masked else planned


def _plan(loads: Floats, physical: int, ranks: int, nodes: int, groups: int) -> Placement:
    """Return the plan for checked arguments, with a number of groups that is a multiple of the nodes'."""
    layers, experts = loads.shape
    of_node = _experts_of_nodes(loads, nodes, groups)
    node_loads = _pick(loads, of_node.reshape(layers, experts)).reshape(of_node.shape)

    replicas = replicate(node_loads, physical // nodes, ranks // nodes)
    replica_loads = _pick(per_replica(node_loads, replicas.counts), replicas.experts)

    # The physical experts of a rank are consecutive, and so are the ranks of a node.
    order = pack(replica_loads, replicas.experts, ranks // nodes).reshape(replica_loads.shape)
    held = _pick(of_node, _pick(replicas.experts, order)).reshape(layers, physical)
    ordinal = _pick(replicas.ordinals, order).reshape(layers, physical)

    count = np.empty((layers, experts), np.int64)
    np.put_along_axis(count, of_node.reshape(layers, experts), replicas.counts.reshape(layers, experts), axis=1)
    places = np.full((layers, experts, count.max()), -1, np.int64)
    places[np.arange(layers)[:, None], held, ordinal] = np.arange(physical)
    return Placement(torch.from_numpy(held), torch.from_numpy(places), torch.from_numpy(count), ranks)


def _on_ranks(planned: Placement, ranks: list[int], num_ranks: int) -> Placement:
    """Return a placement in which some ranks have the places of a placement for them alone, and others are empty."""
    of_rank = planned.num_physical_experts // planned.num_ranks
    ids = torch.tensor([rank * of_rank + place for rank in ranks for place in range(of_rank)], device="cpu")
    held = torch.full((planned.num_layers, num_ranks * of_rank), -1, device="cpu")
    held[:, ids] = planned.physical_to_logical_map
    places = planned.logical_to_physical_map
    return Placement(held, torch.where(places < 0, -1, ids[places]), planned.expert_count, num_ranks)


def _experts_of_nodes(loads: Floats, nodes: int, groups: int) -> Ints:
    """Pack groups onto nodes, and return the logical experts of each node: [layers * nodes, experts / nodes]."""
    layers, experts = loads.shape
    size = experts // groups
    # Sums of float32 would depend on the order of additions, which is NumPy's choice.
    group_loads = loads.reshape(layers, groups, size).sum(axis=2, dtype=np.float64).astype(np.float32)
    packed = pack(group_loads, np.broadcast_to(np.arange(groups), group_loads.shape), nodes)
    return (packed[..., None] * size + np.arange(size)).reshape(layers * nodes, experts // nodes)


def _pick(values: np.ndarray, index: Ints) -> np.ndarray:
    """Return the values of each row at the indices of that row."""
    return np.take_along_axis(values, index, axis=1)
