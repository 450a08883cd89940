"""Which nodes the ranks of a benchmark on GPUs make, and what joins these."""

from __future__ import annotations

import os
from typing import Any

from deep_ep_py.bench.config import BenchConfig, CapabilityError
from deep_ep_py.bench.launch import under_torchrun


def torchrun_variable(name: str) -> int:
    """Return a number that torchrun has set.

    Raises
    ------
    ValueError
        It has not.
    """
    value = os.environ.get(name, "")
    if not value.isdecimal():
        raise ValueError(f"{name}={value!r}: expected a number in the environment, as torchrun sets it")
    return int(value)


def machines() -> int:
    """Return on how many machines torchrun has started ranks.

    Raises
    ------
    ValueError
        It has started none, or not as many on each.
    """
    ranks, local_ranks = torchrun_variable("WORLD_SIZE"), torchrun_variable("LOCAL_WORLD_SIZE")
    if local_ranks < 1 or ranks % local_ranks:
        raise ValueError(f"{ranks} ranks, {local_ranks} of them on this machine: expected as many on each machine")
    return ranks // local_ranks


def require_nodes(config: BenchConfig) -> None:
    """Check that ranks with a GPU each, or those that share one, can make a run's nodes.

    Raises
    ------
    ValueError
        They cannot.
    CapabilityError
        They could, and it is not supported.
    """
    if not under_torchrun():
        if config.nodes > 1:
            raise CapabilityError(
                f"--nodes {config.nodes}: on GPUs under torchrun alone, with a process and a GPU for each rank; use "
                "--nodes 1"
            )
        if config.heap == "nvshmem":
            raise CapabilityError("--heap nvshmem: under torchrun alone, for each of NVSHMEM's PEs is a process")
        return
    there = machines()
    if config.nodes % there:
        raise ValueError(f"--nodes is {config.nodes}; expected a multiple of the {there} machines of torchrun's ranks")
    if config.nodes > there and config.heap != "nvshmem" and config.fabric is None:
        where = "one machine" if there == 1 else f"{there} machines"
        raise ValueError(
            f"--nodes is {config.nodes}; expected --heap nvshmem or --fabric with it: the ranks are on {where}, and "
            "something must join nodes of the same one"
        )


def buffer_options(config: BenchConfig) -> dict[str, Any]:
    """Return what a Buffer on GPUs is told of nodes."""
    return {
        "ranks_per_node": config.ranks // config.nodes,
        "fabric": config.fabric,
        "hops": config.hops or None,
        "heap": config.heap,
    }


def transport(buffer: Any, config: BenchConfig) -> dict[str, Any]:
    """Return by what ranks reach each other, and where their heaps lie: what became of what was asked for.

    Returns
    -------
    dict
        `paths`: of "peer", "ibgda" and "proxy" those that join two ranks; `heap`: "own" or "nvshmem"; `through_host`:
        1 where rows between nodes go through memory of the host; `machines`; `provider`: of libfabric, as far as it was
        named.

    Raises
    ------
    ValueError
        Nodes are others than the run's, by variables of the environment: then what is expected of sums is, too.
    """
    engine = buffer._engine
    topology = engine.topology
    if topology.nodes != config.nodes:
        raise ValueError(
            f"--nodes is {config.nodes}; expected {topology.nodes}, what {topology.given} in the environment makes"
        )
    mapped = any(is_mapped for rank, is_mapped in enumerate(topology.mapped) if rank != topology.rank)
    return {
        "paths": [*(["peer"] if mapped else []), *topology.networks],
        "heap": "nvshmem" if engine.is_symmetric else "own",
        "through_host": buffer.stats()["through_host"],
        "machines": len(set(topology.machines)),
        "provider": topology.provider,
    }
