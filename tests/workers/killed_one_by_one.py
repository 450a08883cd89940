"""Kills one rank's process, lets the others recover and open files, and kills another: those left must recover again.

Descriptors that told of the first death are closed by then, and their numbers belong to the new files.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from killed_ranks import TRIALS, Hub, answer, fork_ranks

import deep_ep_py as deep_ep
from harness import dispatch_arguments, left_out, make_buffer, round_trip_without

RANKS = 4
SECONDS = 20.0
PIPES = 4


def be_a_rank(hub: Hub) -> None:
    """Dispatch and combine for as long as the parent kills others: recover each time, and open files."""
    trial = TRIALS[RANKS]
    buffer = make_buffer(None, trial.case, "peer", comm=hub)
    hub.parent.send(("went on", []))
    files = []
    rest = trial
    while True:
        try:
            while True:
                handle = buffer.dispatch(**dispatch_arguments(trial.work, hub.rank))[4]
                rest.check_combine(hub.rank, rest.combine(buffer, hub.rank, handle))
        except deep_ep.DeepEPError:
            buffer.recover(buffer.lost_ranks(), timeout=SECONDS / 4)
        files += [os.pipe() for _ in range(PIPES)]
        rest = left_out(trial, buffer.masked_ranks)
        round_trip_without(buffer, hub.rank, trial, rest)
        hub.parent.send(("went on", buffer.masked_ranks))


def gather(connections: list[Connection], expected: list[int] | None, until: float) -> list[Any]:
    """Serve the ranks that these connections lead to until each has said that it went on."""
    gathered: dict[int, Any] = {}
    went_on: dict[int, Any] = {}
    while len(went_on) < len(connections):
        if time.monotonic() > until:
            raise TimeoutError(f"only ranks {sorted(went_on)} went on without {expected}")
        for connection in wait(connections, timeout=0.1):
            rank = connections.index(connection)
            kind, value = connection.recv()
            if kind == "gather":
                gathered[rank] = value
            elif kind == "went on":
                went_on[rank] = value
            else:
                raise RuntimeError(f"rank {rank} {kind} {value}")
        if len(gathered) == len(connections):
            answer(gathered, connections, [gathered[rank] for rank in range(len(connections))])
    return [went_on[rank] for rank in range(len(connections))]


def main() -> None:
    torch.set_num_threads(1)
    until = time.monotonic() + SECONDS
    pids, connections = fork_ranks(RANKS, be_a_rank)
    try:
        lost: list[int] = []
        assert gather(connections, lost, until) == [lost] * RANKS
        for victim in (3, 2):
            os.kill(pids[victim], signal.SIGKILL)
            lost = sorted([*lost, victim])
            left = connections[:victim]
            assert gather(left, lost, until) == [lost] * len(left)
    except (AssertionError, RuntimeError, TimeoutError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
