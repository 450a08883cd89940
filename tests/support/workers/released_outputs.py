"""Two rank processes that keep many large outputs, drop all but one, and continue with small ones: the memory of the
dropped ones goes back to the system, and all results are right, those of the kept one to the end.
"""

from __future__ import annotations

import ctypes
import json
from typing import Any

import torch

import deep_ep_py as deep_ep
from cases import Case
from forked_ranks import Hub, run_scenarios
from harness import Trial, dispatch_arguments, make_buffer, round_trip

torch.set_num_threads(1)  # before anything is computed: threads do not outlive a fork

RANKS, PAGE = 2, 4096
ARENA = 256 << 20
LARGE = Trial.of(Case("large", RANKS, 256, hidden=2048, topk=2, experts=4))
SMALL = Trial.of(Case("small", RANKS, 8, hidden=64, topk=2, experts=4))
KEPT = 40
OPERATIONS = 1200  # until the memory is due, and then for all of it in small steps
SLACK = 2 << 20

_libc = ctypes.CDLL(None, use_errno=True)


def resident(buffer: deep_ep.Buffer) -> int:
    """Return how much of this rank's arena is in memory, whichever rank has touched it, as the system says."""
    engine = buffer._engine
    arena = engine.region_memory().data_ptr() + engine.regions * engine.region_bytes  # is behind the regions
    pages = (ctypes.c_ubyte * (ARENA // PAGE))()
    if _libc.mincore(ctypes.c_void_p(arena), ctypes.c_size_t(ARENA), pages) != 0:
        raise OSError(ctypes.get_errno(), "mincore")
    return PAGE * sum(page & 1 for page in pages)


def keep_and_drop(hub: Hub) -> None:
    """Keep outputs, drop them, use the Buffer for something small, and report what is in memory."""
    rank = hub.rank
    buffer = make_buffer(None, LARGE.case, "peer", comm=hub, num_nvl_bytes=1 << 20, arena_bytes=ARENA)

    def dispatch() -> Any:
        return buffer.dispatch(**dispatch_arguments(LARGE.work, rank))

    kept = [dispatch() for _ in range(KEPT)]
    stats = buffer.stats()
    assert stats["rounds"] == 0 and stats["arena_returned"] == 0, stats
    before = resident(buffer)
    assert stats["arena_used"] <= before + SLACK and before <= stats["arena_resident"], (before, stats)
    for results in kept:
        LARGE.check_dispatch(rank, results)
    last = kept[KEPT // 2]  # in the middle of what goes
    del kept, results
    while buffer.stats()["operations"] < KEPT + OPERATIONS:
        round_trip(buffer, rank, SMALL, 1)
    stats, after = buffer.stats(), resident(buffer)
    if rank == 0:  # lines of two processes could mix
        print(json.dumps({"before": before, "after": after, **stats}), flush=True)
    assert after <= stats["arena_used"] + SLACK, (before, after, stats)
    assert after <= stats["arena_resident"] <= stats["arena_used"] + SLACK, (after, stats)
    LARGE.check_dispatch(rank, last)
    # What was given back can be used again, and rows can be combined where they are.
    kept = [dispatch() for _ in range(KEPT)]
    for results in [last, *kept]:
        LARGE.check_dispatch(rank, results)
        LARGE.check_combine(rank, LARGE.combine(buffer, rank, results[4]))
    assert resident(buffer) >= before - SLACK
    hub.allgather(None)
    buffer.destroy()
    hub.tell("done")


if __name__ == "__main__":
    run_scenarios(RANKS, keep_and_drop, seconds=60.0)
