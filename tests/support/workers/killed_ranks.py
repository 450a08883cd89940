"""Kills one of several rank processes at a random moment, again and again, and reports the others' outcomes: a line of
JSON per trial. Ranks are forked from this process, which has imported all they need and started no thread.
"""

from __future__ import annotations

import os
import random
import re
import signal
import time
from dataclasses import replace
from typing import Any

import torch

import deep_ep_py as deep_ep
from cases import Case
from deep_ep_py.transport.bootstrap import start
from forked_ranks import SETTLE_SECONDS, Held, Hub, World, kept_since, print_trials
from harness import Trial, dispatch_arguments, left_out, make_buffer, round_trip_without

torch.set_num_threads(1)  # before anything is computed: threads do not outlive a fork

MACHINES = "machines"
"""As a fabric: each half of the ranks, or each rank if their number is odd, behaves as if on a machine of its own, and
the Buffer chooses."""
FABRICS = tuple(os.environ.get("KILLED_RANKS_FABRICS", "peer,weak,ibgda").split(","))
HUNG_SECONDS = 20.0
CHILD_SECONDS = 1.5
CASES = {
    ranks: Case("killed", ranks, 40, hidden=256, topk=2, experts=2 * ranks, arena_bytes=1 << 20) for ranks in (3, 4)
}
TRIALS = {ranks: Trial.of(case) for ranks, case in CASES.items()}
IN_TWO_HOPS = Trial.of(replace(CASES[4], ranks_per_node=2, hops=2))


def trial_of(ranks: int, fabric: str) -> Trial:
    return IN_TWO_HOPS if fabric == MACHINES and ranks == 4 else TRIALS[ranks]


def fork_a_child(hub: Hub) -> None:
    """Fork a child that outlives this process, and keeps its sockets open, for some time."""
    if os.fork() == 0:
        hub.parent.close()
        time.sleep(CHILD_SECONDS)
        os._exit(0)


def be_a_rank(hub: Hub, fabric: str, with_child: bool) -> None:
    """Dispatch and combine until a failure, report what and when to the parent, continue with the remaining ranks, and
    report what is still held once the Buffer has been released."""
    before = Held.now()
    buffers: list[deep_ep.Buffer] = []
    try:
        work_until_failure(hub, buffers, fabric, with_child)
    except (deep_ep.DeepEPError, ConnectionError) as error:
        hub.tell("raised", (time.monotonic(), type(error).__name__, str(error)))
    if buffers:
        buffer = buffers.pop()
        buffer.recover(buffer.lost_ranks(), timeout=HUNG_SECONDS / 4)
        recovered = time.monotonic()
        go_on(buffer, hub.rank, fabric)
        hub.tell("went on", (recovered, buffer.masked_ranks))
        buffer.destroy()
        del buffer
    hub.tell("kept", kept_since(before))


def work_until_failure(hub: Hub, buffers: list[deep_ep.Buffer], fabric: str, with_child: bool) -> None:
    trial = trial_of(hub.size, fabric)
    if fabric == MACHINES:
        machine = hub.rank // (trial.case.ranks_per_node or 1)
        start.machine_name = lambda: f"machine {machine}"
    buffer = make_buffer(None, trial.case, None if fabric == MACHINES else fabric, comm=hub)
    buffers.append(buffer)
    if with_child:
        fork_a_child(hub)
    hub.tell("made")
    while True:
        handle = buffer.dispatch(**dispatch_arguments(trial.work, hub.rank))[4]
        trial.check_combine(hub.rank, trial.combine(buffer, hub.rank, handle))


def go_on(buffer: deep_ep.Buffer, rank: int, fabric: str) -> None:
    trial = trial_of(buffer.group_size, fabric)
    rest = left_out(trial, buffer.masked_ranks)
    for _ in range(5):
        round_trip_without(buffer, rank, trial, rest)


def run_trial(random_: random.Random, number: int) -> dict[str, Any]:
    """Start ranks, kill one, and observe the others."""
    ranks, fabric = random_.choice(list(TRIALS)), FABRICS[number % len(FABRICS)]
    victim = random_.randrange(ranks)
    # In every fourth trial, while the Buffer is made, which takes some 20 ms, and longer between machines.
    early = number % 4 == 3
    making = 0.2 if fabric == MACHINES else 0.03
    moment = random_.uniform(0.0, making if early else 0.4)
    with_child = number % 5 == 1
    before = Held.now()
    began = time.monotonic()
    world = World(ranks, be_a_rank, fabric, with_child)
    killed = None
    made, outcomes, went_on, kept = set(), {}, {}, {}
    timed_from = began if early else None
    while world.open and time.monotonic() < began + HUNG_SECONDS:
        if killed is None and timed_from is not None and time.monotonic() >= timed_from + moment:
            os.kill(world.pids[victim], signal.SIGKILL)
            killed = time.monotonic()
        for rank, kind, value in world.messages(0.002):
            if kind == "made":
                made.add(rank)
                timed_from = timed_from or (time.monotonic() if len(made) == ranks else None)
            elif kind == "went on":
                went_on[rank] = value
            elif kind == "kept":
                kept[rank] = value
            else:  # the first gives the cause, a second means that something else failed
                outcomes.setdefault(rank, []).append(value)
    hung = sorted(world.open - {victim})
    statuses = world.end()
    cause = re.compile(rf"rank {victim}'s process \(pid {world.pids[victim]}( on [0-9.]+)?\) has died")
    survivors = {
        rank: {
            "seconds": round(raised[0][0] - (killed or began), 3),
            "named": cause.search(raised[0][2]) is not None,
            "texts": [f"{kind}: {text}" for _, kind, text in raised],
            "recovered": round(went_on[rank][0] - raised[0][0], 3) if rank in went_on else None,
            "masked": went_on[rank][1] if rank in went_on else None,
            "status": statuses[rank],
            "kept": kept.get(rank),
        }
        for rank, raised in sorted(outcomes.items())
        if rank != victim
    }
    return {
        "trial": number,
        "ranks": ranks,
        "fabric": fabric,
        "with_child": with_child,
        "victim": victim,
        "killed_at": round((killed or began) - began, 3),
        "made": len(made),
        "hung": hung,
        "survivors": survivors,
        "left_behind": world.leftovers(SETTLE_SECONDS + CHILD_SECONDS),
        # Threads are excluded: a library ends some of its own at a fork.
        "kept_by_parent": Held.now().descriptors != before.descriptors,
    }


if __name__ == "__main__":
    print_trials(__doc__, "kills", run_trial)
