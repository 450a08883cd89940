"""The sizes of the domains that a group's ranks form, before there is a Buffer."""

from __future__ import annotations

from typing import Any

from deep_ep_py.base import arguments
from deep_ep_py.transport.bootstrap.groups import make_bootstrap
from deep_ep_py.transport.bootstrap.machines import machine_name


def get_physical_domain_size(group: Any) -> tuple[int, int]:
    """Return how many machines the ranks of a group are on, and how many ranks each has. Collective.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup
        The ranks. A Buffer that is told of other nodes (`ranks_per_node`) has domains of its own.

    Returns
    -------
    num_rdma_ranks, num_nvlink_ranks : int

    Raises
    ------
    ValueError
        The machines have different numbers of ranks, or their ranks are not consecutive.
    """
    bootstrap = make_bootstrap(group)
    machines = bootstrap.all_gather(machine_name())
    each = machines.count(machines[0])
    nodes = len(set(machines))
    blocks = [set(machines[first : first + each]) for first in range(0, len(machines), each)]
    if len(machines) != nodes * each or any(len(block) != 1 for block in blocks):
        raise ValueError("group: expected the same number of consecutive ranks on each machine")
    return nodes, each


def get_logical_domain_size(group: Any, allow_hybrid_mode: bool = True) -> tuple[int, int]:
    """Return how rows travel among the ranks of a group. Collective.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup
        The ranks.
    allow_hybrid_mode : bool
        Whether rows may be forwarded in nodes.

    Returns
    -------
    num_scaleout_ranks, num_scaleup_ranks : int
        Machines and ranks per machine if rows are forwarded there, otherwise 1 and the number of ranks.

    Raises
    ------
    ValueError
        As `get_physical_domain_size`.
    """
    nodes, each = get_physical_domain_size(group)
    forwards = arguments.flag("allow_hybrid_mode", allow_hybrid_mode) and nodes > 1 and each > 1
    return (nodes, each) if forwards else (1, nodes * each)
