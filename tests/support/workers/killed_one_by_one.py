"""Kills one rank's process, lets the others recover and open files, and kills another: the rest must recover again.

Descriptors that reported the first death are closed by then, and their numbers belong to the new files.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import torch
from killed_ranks import TRIALS

import deep_ep_py as deep_ep
from forked_ranks import Hub, World
from harness import dispatch_arguments, left_out, make_buffer, round_trip_without

RANKS = 4
SECONDS = 20.0
PIPES = 4


def be_a_rank(hub: Hub) -> None:
    """Dispatch and combine while the parent kills other ranks: recover each time, and open files."""
    trial = TRIALS[RANKS]
    buffer = make_buffer(None, trial.case, "peer", comm=hub)
    hub.tell("went on", [])
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
        hub.tell("went on", buffer.masked_ranks)


def went_on(world: World, left: int, until: float) -> list[Any]:
    """Return the messages of the first `left` ranks once each of them has continued."""
    said: dict[int, Any] = {}
    while len(said) < left:
        if time.monotonic() > until:
            raise TimeoutError(f"only ranks {sorted(said)} went on")
        for rank, kind, value in world.messages(0.1):
            if kind != "went on":
                raise RuntimeError(f"rank {rank} {kind} {value}")
            said[rank] = value
    return [said[rank] for rank in range(left)]


def main() -> None:
    torch.set_num_threads(1)
    until = time.monotonic() + SECONDS
    world = World(RANKS, be_a_rank)
    try:
        lost: list[int] = []
        assert went_on(world, RANKS, until) == [lost] * RANKS
        for victim in (3, 2):
            os.kill(world.pids[victim], signal.SIGKILL)
            lost = sorted([*lost, victim])
            assert went_on(world, victim, until) == [lost] * victim
    except (AssertionError, RuntimeError, TimeoutError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
    finally:
        world.end()


if __name__ == "__main__":
    main()
