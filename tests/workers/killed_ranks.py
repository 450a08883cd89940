"""Kills one of several rank processes at a random moment, again and again, and says what became of the others: a line
of JSON per trial. Ranks are forked from this process, which has imported all they need and started no thread.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

import deep_ep_py as deep_ep
from cases import Case
from harness import Trial, dispatch_arguments, left_out, make_buffer, round_trip_without

FABRICS = ("peer", "weak", "ibgda")
HUNG_SECONDS = 20.0
CHILD_SECONDS = 1.5
TRIALS = {
    ranks: Trial.of(Case("killed", ranks, 40, hidden=256, topk=2, experts=2 * ranks, arena_bytes=1 << 20))
    for ranks in (3, 4)
}


class Hub:
    """As much of an mpi4py communicator as a Buffer needs, through the parent."""

    def __init__(self, rank: int, size: int, parent: Connection) -> None:
        self.rank, self.size, self.parent = rank, size, parent

    def Get_rank(self) -> int:  # noqa: N802 - mpi4py's
        return self.rank

    def Get_size(self) -> int:  # noqa: N802
        return self.size

    def allgather(self, value: Any) -> list[Any]:
        self.parent.send(("gather", value))
        values = self.parent.recv()
        if values is None:
            raise ConnectionError("a rank was killed before the ranks had met")
        return values


def fork_a_child(parent: Connection) -> None:
    """One that outlives this process, and keeps its sockets open, for some time."""
    if os.fork() == 0:
        parent.close()
        time.sleep(CHILD_SECONDS)
        os._exit(0)


def be_a_rank(hub: Hub, fabric: str, with_child: bool) -> None:
    """Dispatch and combine until something happens, tell the parent what and when, and go on with those left."""
    trial = TRIALS[hub.size]
    buffer = None
    try:
        buffer = make_buffer(None, trial.case, fabric, comm=hub)
        if with_child:
            fork_a_child(hub.parent)
        hub.parent.send(("made", None))
        while True:
            handle = buffer.dispatch(**dispatch_arguments(trial.work, hub.rank))[4]
            trial.check_combine(hub.rank, trial.combine(buffer, hub.rank, handle))
    except (deep_ep.DeepEPError, ConnectionError) as error:
        hub.parent.send(("raised", (time.monotonic(), type(error).__name__, str(error))))
    if buffer is None:
        return
    buffer.recover(buffer.lost_ranks(), timeout=HUNG_SECONDS / 4)
    recovered = time.monotonic()
    rest = left_out(trial, buffer.masked_ranks)
    for _ in range(5):
        round_trip_without(buffer, hub.rank, trial, rest)
    hub.parent.send(("went on", (recovered, buffer.masked_ranks)))
    buffer.destroy()


def fork_ranks(ranks: int, be_a_rank: Callable[[Hub], None]) -> tuple[list[int], list[Connection]]:
    """Fork the ranks; return their processes and how to talk to them."""
    pids, connections = [], []
    for rank in range(ranks):
        ours, theirs = Pipe()
        pid = os.fork()
        if pid == 0:
            try:
                for connection in (ours, *connections):
                    connection.close()
                be_a_rank(Hub(rank, ranks, theirs))
            except BaseException as error:  # noqa: B036 - a fork must not go on as its parent
                theirs.send(("raised", (time.monotonic(), type(error).__name__, str(error))))
            os._exit(0)
        theirs.close()
        pids.append(pid)
        connections.append(ours)
    return pids, connections


def leftovers(pids: list[int], before: set[str]) -> list[str]:
    """Name what these processes have left behind, once their children have gone too."""
    until = time.monotonic() + 2 * CHILD_SECONDS
    while (found := _leftovers(pids, before)) and time.monotonic() < until:
        time.sleep(0.1)
    return found


def _leftovers(pids: list[int], before: set[str]) -> list[str]:
    sockets = [line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines() if "@deep_ep_py-" in line]
    names = [name for name in sockets if int(name.split("-")[1]) in pids]
    return names + sorted({path.name for path in Path("/dev/shm").iterdir()} - before)


def run_trial(random_: random.Random, number: int) -> dict[str, Any]:
    """Start ranks, kill one, see what the others do."""
    ranks, fabric = random_.choice(list(TRIALS)), FABRICS[number % len(FABRICS)]
    victim = random_.randrange(ranks)
    # Every fourth while the Buffer is made, which takes some 20 ms.
    early = number % 4 == 3
    moment = random_.uniform(0.0, 0.03 if early else 0.4)
    before = {path.name for path in Path("/dev/shm").iterdir()}
    began = time.monotonic()
    with_child = number % 5 == 1
    pids, connections = fork_ranks(ranks, partial(be_a_rank, fabric=fabric, with_child=with_child))
    killed = None
    made, gathered, outcomes, went_on = set(), {}, {}, {}
    timed_from = began if early else None
    open_ = dict(zip(connections, range(ranks), strict=True))
    while open_ and time.monotonic() < began + HUNG_SECONDS:
        if killed is None and timed_from is not None and time.monotonic() >= timed_from + moment:
            os.kill(pids[victim], signal.SIGKILL)
            killed = time.monotonic()
        for connection in wait(list(open_), timeout=0.002):
            rank = open_[connection]
            try:
                kind, value = connection.recv()
            except (EOFError, ConnectionResetError):
                del open_[connection]
                continue
            if kind == "made":
                made.add(rank)
                timed_from = timed_from or (time.monotonic() if len(made) == ranks else None)
            elif kind == "gather":
                gathered[rank] = value
            elif kind == "went on":
                went_on[rank] = value
            else:  # the first says why, the second that recovering has failed
                outcomes.setdefault(rank, []).append(value)
        if len(gathered) == ranks:
            answers = [gathered[rank] for rank in range(ranks)]
            answer(gathered, connections, answers)
        elif killed is not None and connections[victim] not in open_:
            answer(gathered, connections, None)
    hung = sorted(rank for rank in open_.values() if rank != victim)
    for rank in open_.values():
        os.kill(pids[rank], signal.SIGKILL)
    for pid in pids:
        os.waitpid(pid, 0)
    cause = f"rank {victim}'s process (pid {pids[victim]}) has died"
    survivors = {
        rank: {
            "seconds": round(raised[0][0] - (killed or began), 3),
            "named": cause in raised[0][2],
            "texts": [f"{kind}: {text}" for _, kind, text in raised],
            "recovered": round(went_on[rank][0] - raised[0][0], 3) if rank in went_on else None,
            "masked": went_on[rank][1] if rank in went_on else None,
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
        "left_behind": leftovers(pids, before),
    }


def answer(gathered: dict[int, Any], connections: list[Connection], values: Any) -> None:
    for rank in gathered:
        with suppress(BrokenPipeError):  # killed in between
            connections[rank].send(values)
    gathered.clear()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    random_ = random.Random(options.seed)
    for number in range(options.trials):
        print(json.dumps(run_trial(random_, number)), flush=True)


if __name__ == "__main__":
    main()
