"""Kills or stops one of several rank processes at a random moment of low-latency calls with `enable_shrink`, again and
again, and reports the others' outcomes: a line of JSON per trial. Ranks are forked from this process, which has
imported all they need and started no thread.
"""

from __future__ import annotations

import os
import random
import signal
import time
from typing import Any

import torch

import deep_ep_py as deep_ep
from forked_ranks import Hub, World, print_trials
from low_latency import Sizes, Work, make_buffer

torch.set_num_threads(1)  # before anything is computed: threads do not outlive a fork

FABRICS = ("peer", "ibgda", "mixed")
HUNG_SECONDS = 40.0
KILL_TIMEOUT, STOP_TIMEOUT = 600.0, 2.0
ROUNDS = 400
SIZES = {ranks: Sizes("lost", ranks, (24,) * ranks, 24, 128, 3, 2 * ranks) for ranks in (3, 4)}
WORKS = {ranks: Work.of(sizes, results=False) for ranks, sizes in SIZES.items()}


def results_of(packed: torch.Tensor, rank: int, local: int) -> torch.Tensor:
    """Return the experts' results: rows multiplied by a power of two each, so that they are exact."""
    scales = torch.tensor([2.0 ** ((rank * local + e) % 5) for e in range(local)])
    return (packed.float() * scales[:, None, None]).to(torch.bfloat16)


def expected_sums(work: Work, rank: int, *lost: int) -> torch.Tensor:
    """Return the combined rows of a rank without the results of the lost ranks."""
    sizes, ids, weights = work.sizes, work.topk_idx[rank], work.weights[rank]
    sums = torch.zeros((len(ids), sizes.hidden))
    for k in range(sizes.topk):
        expert = ids[:, k]
        counts = (expert >= 0) & ~torch.isin(expert // sizes.local, torch.tensor(lost))
        result = (work.x[rank].float() * 2.0 ** (expert % 5)[:, None]).to(torch.bfloat16).float()
        sums = torch.where(counts[:, None], sums + weights[:, k, None] * result, sums)
    return sums.to(torch.bfloat16)


def check_rows(work: Work, rank: int, results: Any, victim: int) -> str:
    """Return how the victim's rows arrived: "all", "none", or "zeros" for some."""
    packed, counts, handle = results[:3]
    ranges, kinds = handle[1], set()
    for expert, own in enumerate(work.packed[rank].pairs):
        counted = {source: int(ranges[expert, source]) & 0xFFFFFFFF for source in range(work.sizes.ranks)}
        wanted = [(source, token) for source, token in own if source != victim or counted[victim]]
        if any(source == victim for source, _ in own):
            kinds.add("all" if counted[victim] else "none")
        assert int(counts[expert]) == len(wanted), (rank, expert, int(counts[expert]), len(wanted))
        for row, (source, token) in enumerate(wanted):
            assert int(handle[0][expert, row]) == token
            if torch.equal(packed[expert, row], work.x[source][token]):
                continue
            assert source == victim and not packed[expert, row].any(), (rank, expert, source, token)
            kinds.add("zeros")
    return "zeros" if "zeros" in kinds else "none" if "none" in kinds else "all"


def be_a_rank(hub: Hub, fabric: str, victim: int, timeout: float) -> None:
    """Dispatch and combine so many times, and check all results."""
    work, rank = WORKS[hub.size], hub.rank
    sizes, seen = work.sizes, {"all": 0, "none": 0, "zeros": 0}
    buffer = make_buffer(None, sizes, fabric, comm=hub, enable_shrink=True, timeout=timeout, nic=deep_ep.NicOptions())
    hub.tell("made")
    sums = {kind: expected_sums(work, rank, *lost) for kind, lost in (("all", ()), ("none", (victim,)))}
    for turn in range(ROUNDS):
        hooks = turn % 3 == 1
        arguments = (work.x[rank], work.topk_idx[rank], sizes.max_tokens, sizes.experts)
        results = buffer.low_latency_dispatch(*arguments, use_fp8=False, return_recv_hook=hooks)
        if hooks:
            results[4]()
        seen[check_rows(work, rank, results, victim)] += 1
        made = results_of(results[0], rank, sizes.local)
        back = (work.topk_idx[rank], work.weights[rank], results[2])
        combined, _, hook = buffer.low_latency_combine(made, *back, return_recv_hook=hooks)
        if hooks:
            hook()
        assert any(torch.equal(combined, sums[kind]) for kind in sums), (rank, turn)
        if turn % 10 == 5:
            buffer.clean_low_latency_buffer(sizes.max_tokens, sizes.hidden, sizes.experts)
    hub.tell("finished", (time.monotonic(), buffer.masked_ranks, seen))
    hub.parent.recv()  # others may still need this rank
    buffer.destroy()


def run_trial(random_: random.Random, number: int) -> dict[str, Any]:
    """Start ranks, lose one, and observe the others."""
    ranks, fabric, stops = random_.choice(list(SIZES)), FABRICS[number % len(FABRICS)], number % 2 == 1
    victim, moment = random_.randrange(ranks), random_.uniform(0.0, 0.4)
    world = World(ranks, be_a_rank, fabric, victim, STOP_TIMEOUT if stops else KILL_TIMEOUT)
    began, lost_at, all_made = time.monotonic(), None, None
    made, finished, failed, released = set(), {}, {}, False
    while world.open and time.monotonic() < began + HUNG_SECONDS:
        if lost_at is None and all_made is not None and time.monotonic() >= all_made + moment:
            os.kill(world.pids[victim], signal.SIGSTOP if stops else signal.SIGKILL)
            lost_at = time.monotonic()
        for rank, kind, value in world.messages(0.002):
            if kind == "made":
                made.add(rank)
                all_made = time.monotonic() if len(made) == ranks else None
            else:
                (finished if kind == "finished" else failed)[rank] = value
        living = set(range(ranks)) - ({victim} if lost_at is not None else set())
        if not released and living <= set(finished) | set(failed) and lost_at is not None:
            if stops:
                os.kill(world.pids[victim], signal.SIGCONT)
            world.send(None)
            released = True
    hung = sorted(world.open)
    world.end()
    return {
        "trial": number,
        "ranks": ranks,
        "fabric": fabric,
        "stops": stops,
        "victim": victim,
        # Lost before the others had everything that they needed from it.
        "hit": victim not in finished and any(value[1] for value in finished.values()),
        "hung": hung,
        "seconds": {rank: round(value[0] - lost_at, 3) for rank, value in finished.items() if lost_at is not None},
        "finished_by": sorted(str(rank) for rank in finished),
        "masked": {rank: value[1] for rank, value in finished.items()},
        "seen": {rank: value[2] for rank, value in finished.items()},
        "failed": {rank: value[2] for rank, value in failed.items()},
    }


if __name__ == "__main__":
    print_trials(__doc__, "lost ranks", run_trial)
