"""The nodes formed by the ranks of a GPU benchmark, and what joins them."""

from __future__ import annotations

import os
from typing import Any

from deep_ep_py.tools.bench.config import BenchConfig, CapabilityError
from deep_ep_py.tools.bench.launch import under_torchrun


def torchrun_variable(name: str) -> int:
    """Return a number that torchrun has set.

    Raises
    ------
    ValueError
        The variable is not set to a number.
    """
    value = os.environ.get(name, "")
    if not value.isdecimal():
        raise ValueError(f"{name}={value!r}: expected a number in the environment, as torchrun sets it")
    return int(value)


def machines() -> int:
    """Return the number of machines on which torchrun has started ranks.

    Raises
    ------
    ValueError
        It has started none, or different numbers on different machines.
    """
    ranks, local_ranks = torchrun_variable("WORLD_SIZE"), torchrun_variable("LOCAL_WORLD_SIZE")
    if local_ranks < 1 or ranks % local_ranks:
        raise ValueError(f"{ranks} ranks, {local_ranks} of them on this machine: expected equally many on each machine")
    return ranks // local_ranks


def require_nodes(config: BenchConfig) -> None:
    """Check that the ranks, with a GPU each or sharing one, can form the nodes of a run.

    Raises
    ------
    ValueError
        They cannot.
    CapabilityError
        They could, but this is not supported.
    """
    if not under_torchrun():
        if config.nodes > 1:
            raise CapabilityError(
                f"--nodes {config.nodes}: on GPUs only under torchrun, with a process and a GPU for each rank; use "
                "--nodes 1"
            )
        if config.heap == "nvshmem":
            raise CapabilityError("--heap nvshmem: only under torchrun, because each of NVSHMEM's PEs is a process")
        return
    there = machines()
    if config.nodes % there:
        raise ValueError(f"--nodes is {config.nodes}; expected a multiple of the {there} machines of torchrun's ranks")
    if config.nodes > there and config.heap != "nvshmem" and config.fabric is None:
        where = "one machine" if there == 1 else f"{there} machines"
        raise ValueError(
            f"--nodes is {config.nodes}; expected --heap nvshmem or --fabric with it: the ranks are on {where}, and "
            "something must join nodes on the same machine"
        )


def buffer_options(config: BenchConfig) -> dict[str, Any]:
    """Return the arguments about nodes for a Buffer on GPUs."""
    return {
        "ranks_per_node": config.ranks // config.nodes,
        "fabric": config.fabric,
        "hops": config.hops or None,
        "heap": config.heap,
    }


def transport(buffer: Any, config: BenchConfig) -> dict[str, Any]:
    """Return how ranks actually reach each other, and where their heaps are.

    Returns
    -------
    dict
        `paths`: those of "peer", "ibgda" and "proxy" that join any two ranks; `heap`: "own" or "nvshmem";
        `through_host`: 1 if rows between nodes go through host memory; `machines`; `provider`: the libfabric provider,
        if one was named.

    Raises
    ------
    ValueError
        Environment variables have made nodes other than the run's, for which the expected sums would be wrong.
    """
    engine = buffer._engine
    topology = engine.topology
    if topology.nodes != config.nodes:
        raise ValueError(
            f"--nodes is {config.nodes}; expected {topology.nodes}, from {topology.given} in the environment"
        )
    mapped = any(is_mapped for rank, is_mapped in enumerate(topology.mapped) if rank != topology.rank)
    return {
        "paths": [*(["peer"] if mapped else []), *topology.networks],
        "heap": "nvshmem" if engine.is_symmetric else "own",
        "through_host": buffer.stats()["through_host"],
        "machines": len(set(topology.machines)),
        "provider": topology.provider,
    }
