"""Kills one of several rank processes at a random moment, again and again, and says what became of the others: a line of
JSON per trial. Ranks are forked from this process, which has imported all they need and started no thread.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import time
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

import deep_ep_py as deep_ep
from cases import Case
from harness import Trial, dispatch_arguments, make_buffer

FABRICS = ("peer", "weak", "ibgda")
HUNG_SECONDS = 20.0
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


def be_a_rank(hub: Hub, fabric: str) -> None:
    """Dispatch and combine until something happens, and tell the parent what and when."""
    trial = TRIALS[hub.size]
    buffer = None
    try:
        buffer = make_buffer(None, trial.case, fabric, comm=hub)
        hub.parent.send(("made", None))
        while True:
            handle = buffer.dispatch(**dispatch_arguments(trial.work, hub.rank))[4]
            trial.check_combine(hub.rank, trial.combine(buffer, hub.rank, handle))
    except (deep_ep.DeepEPError, ConnectionError) as error:
        hub.parent.send(("raised", (time.monotonic(), type(error).__name__, str(error))))
    if buffer is not None:
        buffer.destroy()


def start(ranks: int, fabric: str) -> tuple[list[int], list[Connection]]:
    """Fork the ranks."""
    pids, connections = [], []
    for rank in range(ranks):
        ours, theirs = Pipe()
        pid = os.fork()
        if pid == 0:
            try:
                for connection in (ours, *connections):
                    connection.close()
                be_a_rank(Hub(rank, ranks, theirs), fabric)
            except BaseException as error:  # noqa: B036 - a fork must not go on as its parent
                theirs.send(("raised", (time.monotonic(), type(error).__name__, str(error))))
            os._exit(0)
        theirs.close()
        pids.append(pid)
        connections.append(ours)
    return pids, connections


def leftovers(pids: list[int], before: set[str]) -> list[str]:
    """Name what these processes have left behind."""
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
    pids, connections = start(ranks, fabric)
    killed = None
    made, gathered, outcomes = set(), {}, {}
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
            else:
                outcomes[rank] = value
        if len(gathered) == ranks:
            answers = [gathered[rank] for rank in range(ranks)]
            _answer(gathered, connections, answers)
        elif killed is not None and connections[victim] not in open_:
            _answer(gathered, connections, None)
    hung = sorted(rank for rank in open_.values() if rank != victim)
    for rank in open_.values():
        os.kill(pids[rank], signal.SIGKILL)
    for pid in pids:
        os.waitpid(pid, 0)
    cause = f"rank {victim}'s process (pid {pids[victim]}) has died"
    survivors = {
        rank: {"seconds": round(when - (killed or when), 3), "type": kind, "text": text, "named": cause in text}
        for rank, (when, kind, text) in sorted(outcomes.items())
        if rank != victim
    }
    return {
        "trial": number,
        "ranks": ranks,
        "fabric": fabric,
        "victim": victim,
        "killed_at": round((killed or began) - began, 3),
        "made": len(made),
        "hung": hung,
        "survivors": survivors,
        "left_behind": leftovers(pids, before),
    }


def _answer(gathered: dict[int, Any], connections: list[Connection], values: Any) -> None:
    for rank in gathered:
        try:
            connections[rank].send(values)
        except BrokenPipeError:
            pass  # killed in between
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
