"""Ranks as processes whose NICs carry the rows: the pages through which hosts and failing kernels would notify an
unmapped rank are unmapped for everything except the control plane, which has mappings of its own.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace
from pathlib import Path

import deep_ep_py as deep_ep
from cases import Case
from forked_ranks import Hub, run_scenarios
from harness import Trial, dispatch_arguments, make_buffer

RANKS = 4
CASE = Case("control pages", RANKS, 24, hidden=64, topk=2, experts=8, arena_bytes=1 << 20)
EVERY_RANK_A_NODE = Trial.of(replace(CASE, ranks_per_node=1))
TWO_NODES = Trial.of(replace(CASE, ranks_per_node=2, hops=1))
TWO_HOPS = Trial.of(replace(CASE, ranks_per_node=2, hops=2))
NARROW = Trial.of(Case("narrow", RANKS, 24, hidden=32, topk=2, experts=8))
PROT_NONE = 0

libc = ctypes.CDLL(None, use_errno=True)


def take_pages_away(buffer: deep_ep.Buffer) -> None:
    """Make any access through the heap of an unmapped rank crash this process from now on."""
    runtime, topology = buffer.runtime, buffer._engine.topology
    for peer in range(RANKS):
        if topology.mapped[peer]:
            continue
        begin = runtime.peer_base(peer)
        done = libc.mprotect(ctypes.c_void_p(begin), ctypes.c_size_t(runtime.control_bytes), PROT_NONE)
        assert done == 0, ctypes.get_errno()
        maps = Path("/proc/self/maps").read_text()
        assert f"{begin:x}-{begin + runtime.control_bytes:x} ---s" in maps, maps


def works(buffer: deep_ep.Buffer, trial: Trial) -> None:
    """Check the results of a dispatch and a combine."""
    results = buffer.dispatch(**dispatch_arguments(trial.work, buffer.rank))
    trial.check_dispatch(buffer.rank, results)
    trial.check_combine(buffer.rank, trial.combine(buffer, buffer.rank, results[4]))


def message_of(buffer: deep_ep.Buffer, trial: Trial) -> str:
    """Return the error that a dispatch raises."""
    try:
        buffer.dispatch(**dispatch_arguments(trial.work, buffer.rank))
    except deep_ep.DeepEPError as error:
        return str(error)
    raise AssertionError(f"rank {buffer.rank} raised nothing")


def life(hub: Hub, trial: Trial) -> None:
    """Take a Buffer through calls, mismatched calls, a recovery, a rank that leaves, and another recovery."""
    buffer = make_buffer(None, trial.case, "ibgda", comm=hub, timeout=20.0)
    take_pages_away(buffer)
    works(buffer, trial)
    hub.allgather(None)  # a mismatch also aborts calls that a slower rank has not finished
    message_of(buffer, NARROW if hub.rank == 1 else trial)
    buffer.recover()
    works(buffer, trial)
    if hub.rank == RANKS - 1:
        buffer.destroy()
    else:
        said = message_of(buffer, trial)
        assert f"rank {RANKS - 1}" in said, said
        assert buffer.lost_ranks() == [RANKS - 1]
        buffer.recover([RANKS - 1])
        buffer.dispatch(**dispatch_arguments(trial.work, buffer.rank))
    hub.tell("ended")


def every_rank_a_node(hub: Hub) -> None:
    life(hub, EVERY_RANK_A_NODE)


def two_nodes(hub: Hub) -> None:
    life(hub, TWO_NODES)


def two_hops(hub: Hub) -> None:
    life(hub, TWO_HOPS)


if __name__ == "__main__":
    run_scenarios(RANKS, every_rank_a_node, two_nodes, two_hops)
