"""Stalls one of several rank processes beyond the timeout, again and again, while each rank has three operations in
flight: a line of JSON per round, and one per world of ranks when it ends.

A rank stalls before one of its calls, or its whole process is stopped at a random moment. Results without an exception
have the right bits; then all recover and continue in the same processes. Rows differ in every operation, so that those
of an earlier one are recognized.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

import deep_ep_py as deep_ep
import oracle
from cases import Case
from forked_ranks import Held, Hub, World, kept_since, memory_of_this_process
from harness import Trial, dispatch_arguments, make_buffer

torch.set_num_threads(1)  # before anything is computed: threads do not outlive a fork

TIMEOUT = 0.3
AMPLE_SECONDS = 10.0
HUNG_SECONDS = 30.0
ROUNDS_PER_WORLD = 25
STEPS = ("cached", "cached", "combine", "combine", "echo", "echo", "worst", "counts")
STOPPED = -1


@dataclass(frozen=True)
class Shape:
    """Parameters of a world of ranks, fixed for all its rounds."""

    fabric: str
    ranks: int
    ranks_per_node: int | None
    arena_bytes: int
    regions: int


@dataclass(frozen=True)
class Plan:
    """One round: `stalled` sleeps before its call number `call`; if that is STOPPED, its process is stopped `moment`
    seconds after all have begun. The first rounds of a world have no stall.
    """

    number: int
    steps: tuple[str, ...]
    stalled: int
    call: int
    moment: float
    seconds: float


def shape_of(number: int, random_: random.Random) -> Shape:
    """Worlds alternate: rows directly to their destination, in rounds through the Buffer, over software NICs."""
    ranks = random_.randint(2, 4)
    arena_bytes = 0 if number % 3 == 1 else 1 << 26
    fabric, ranks_per_node = "peer", None
    if number % 3 == 2:
        fabric, ranks = "ibgda", (4, 3, 4)[number // 3 % 3]
        ranks_per_node, arena_bytes = (2, 1, 1)[number // 3 % 3], (1 << 26, 1 << 26, 0)[number // 3 % 3]
    return Shape(fabric, ranks, ranks_per_node, arena_bytes, random_.choice((2, 3)))


def plan_of(number: int, random_: random.Random, ranks: int, usual_seconds: float) -> Plan:
    """Draw a round. `usual_seconds` is the duration of three operations without a stall."""
    steps = tuple(random_.choice(STEPS) for _ in range(3))
    call = random_.choice((0, 1, 2, STOPPED, STOPPED, STOPPED))
    moment = random_.uniform(0.0, usual_seconds)
    seconds = random_.uniform(1.1, 3.0) * TIMEOUT
    return Plan(number, steps, random_.randrange(ranks), call, moment, seconds)


@dataclass(frozen=True)
class Rows:
    """A trial, and the combine results of its rows as they were dispatched."""

    trial: Trial
    echo: list[oracle.Combined]

    @staticmethod
    def of(ranks: int, ranks_per_node: int | None, seed: int) -> Rows:
        case = Case("stalled", ranks, (300, 200, 256, 280)[:ranks], 1024, 4, 4 * ranks, num_nvl_bytes=1 << 21)
        trial = Trial.of(replace(case, ranks_per_node=ranks_per_node), seed)
        weights = [part.topk_weights for part in trial.received]
        tokens = [len(own) for own in trial.work.x]
        per_node = ranks_per_node if trial.case.two_hops else None
        x = [part.x for part in trial.received]
        return Rows(trial, oracle.combine(trial.received, tokens, x, weights, ranks_per_node=per_node))


@cache
def rows_of(ranks: int, ranks_per_node: int | None) -> list[Rows]:
    return [Rows.of(ranks, ranks_per_node, seed) for seed in (1, 2)]


def scaled(sums: oracle.Combined, factor: float) -> oracle.Combined:
    """Scale by a power of two, which changes no rounding."""
    return replace(sums, x=sums.x * factor, exact=sums.exact * factor, tolerance=sums.tolerance * factor)


class Round:
    """One round on one rank."""

    def __init__(self, buffer: deep_ep.Buffer, shape: Shape, plan: Plan) -> None:
        self.buffer, self.plan, self.rank = buffer, plan, buffer.rank
        rows = rows_of(shape.ranks, shape.ranks_per_node)[plan.number % 2]
        self.trial, self.echo = rows.trial, rows.echo
        with buffer.timeout_of(AMPLE_SECONDS):
            results = buffer.dispatch(**dispatch_arguments(self.trial.work, self.rank))
        self.trial.check_dispatch(self.rank, results)
        self.handle = results[4]
        self.sent = results[0], 1.0  # the rows of the latest dispatch, and their factor
        self.right: list[Callable[[], None]] = []  # checks of operations that succeeded

    def begin(self, step: str, factor: float) -> tuple[Any, Callable[[], None]]:
        """Queue an operation. Returns its event, and the check of its results."""
        buffer, rank, trial = self.buffer, self.rank, self.trial
        if step in ("combine", "echo"):
            x, weights = trial.expert.x[rank] * factor, trial.expert.topk_weights[rank]
            expected = trial.expert.expected[0][rank]
            if step == "echo":
                (x, factor), weights, expected = self.sent, trial.received[rank].topk_weights, self.echo[rank]
            sums, sums_of_weights, event = buffer.combine(x, self.handle, weights, async_finish=True)
            return event, lambda: oracle.check_combined(sums, sums_of_weights, scaled(expected, factor))
        work = replace(trial.work, x=[own * factor for own in trial.work.x])
        wanted = replace(trial, received=[replace(part, x=part.x * factor) for part in trial.received])
        if step == "cached":
            results = buffer.dispatch(work.x[rank], handle=self.handle, async_finish=True)
            self.sent = results[0], factor
            return results[5], lambda: wanted.check_cached(rank, results)
        rows = trial.max_rows + 3 if step == "worst" else 0
        results = buffer.dispatch(**dispatch_arguments(work, rank, num_worst_tokens=rows), async_finish=True)
        if rows:
            return results[5], lambda: wanted.check_worst(rank, results, rows)
        self.sent = results[0], factor
        return results[5], lambda: wanted.check_dispatch(rank, results)

    def play(self) -> dict[str, Any]:
        """Queue all operations and wait for all. Returns each one's outcome, and when."""
        queued: list[Any] = []
        stalled_at = None
        began = time.monotonic()
        for index, step in enumerate(self.plan.steps):
            if self.rank == self.plan.stalled and self.plan.call == index:
                stalled_at = time.monotonic()
                time.sleep(self.plan.seconds)
            try:
                queued.append(self.begin(step, 2.0 ** ((3 * self.plan.number + index + 1) % 41 - 20)))
            except deep_ep.DeepEPError as error:
                queued.append(error_of(error))
                break
        waited = [one if isinstance(one, dict) else end_of(*one) for one in queued]
        ended = time.monotonic()
        self.right = [one for one in waited if not isinstance(one, dict)]
        outcomes = [one if isinstance(one, dict) else {"wrong": wrong_of(one)} for one in waited]
        return {"began": began, "ended": ended, "stalled_at": stalled_at, "outcomes": outcomes}


def end_of(event: Any, check: Callable[[], None]) -> Any:
    """Wait for an operation. Returns the check of its results, or its failure."""
    try:
        event.current_stream_wait()
    except deep_ep.DeepEPError as error:
        return error_of(error)
    return check


def error_of(error: deep_ep.DeepEPError) -> dict[str, Any]:
    return {"time": time.monotonic(), "kind": type(error).__name__, "text": str(error)}


def wrong_of(*checks: Callable[[], None]) -> str | None:
    """Return the error of the first check that fails."""
    for check in checks:
        try:
            check()
        except AssertionError as error:
            return str(error)
    return None


def be_a_rank(hub: Hub, shape: Shape) -> None:
    """Play the rounds that the parent sends."""
    before = Held.now()
    play_all(hub, shape)
    hub.tell("kept", kept_since(before))


def play_all(hub: Hub, shape: Shape) -> None:
    case = rows_of(shape.ranks, shape.ranks_per_node)[0].trial.case
    options = {"regions": shape.regions, "arena_bytes": shape.arena_bytes}
    buffer = make_buffer(None, case, shape.fabric, comm=hub, timeout=TIMEOUT, **options)
    hub.tell("recovered", None)
    earlier: list[Callable[[], None]] = []
    while (plan := hub.parent.recv()) is not None:
        this = Round(buffer, shape, plan)
        hub.tell("ready")
        hub.parent.recv()
        report = this.play()
        hub.tell("ended", report)
        if hub.parent.recv():
            buffer.recover(timeout=AMPLE_SECONDS)
        # Successful results stay unchanged until they are dropped.
        wrong = wrong_of(*this.right, *earlier)
        earlier = this.right
        held = Held.now()
        state = {"wrong": wrong, **memory_of_this_process(), "descriptors": sum(held.descriptors.values())}
        hub.tell("recovered", {**state, "threads": held.threads, "arena": buffer.stats()["arena_used"]})
    earlier.clear()
    buffer.destroy()


class Hang(Exception):
    """Ranks from which no message arrives."""


def gather(world: World, wanted: str, stop: tuple[int, float, float] | None = None) -> tuple[dict[int, Any], Any]:
    """Return a message of each rank, and when the rank of `stop`, (rank, moment, seconds), was stopped.

    Raises
    ------
    Hang
        After HUNG_SECONDS.
    RuntimeError
        If a rank reports a failure, or ends.
    """
    found: dict[int, Any] = {}
    began, stopped_at, stopped = time.monotonic(), None, False
    while len(found) < world.ranks or stopped:
        now = time.monotonic()
        if stop is not None and stopped_at is None and now >= began + stop[1]:
            os.kill(world.pids[stop[0]], signal.SIGSTOP)
            stopped_at, stopped = now, True
        if stop is not None and stopped and now >= stopped_at + stop[2]:
            os.kill(world.pids[stop[0]], signal.SIGCONT)
            stopped = False
        if now > began + HUNG_SECONDS:
            raise Hang(f"waiting for {wanted!r} of ranks {sorted(set(range(world.ranks)) - set(found))}")
        for rank, kind, value in world.messages(0.001 if stop is not None else 0.05):
            if kind != wanted:
                raise RuntimeError(f"rank {rank}: {kind}: {value}")
            found[rank] = value
        if wanted != "kept" and len(world.open) < world.ranks:
            raise RuntimeError(f"a rank has ended; still open: {sorted(world.open)}")
    return found, stopped_at


def names_the_cause(failed: dict[int, dict[str, Any]], stalled: int) -> dict[int, str]:
    """Return how each failed rank's first exception leads to the stalled rank: directly, or through ranks it names."""
    mentions = {rank: {int(one) for one in re.findall(r"rank (\d+)", error["text"])} for rank, error in failed.items()}
    found = {}
    for rank, direct in mentions.items():
        reached = direct - {rank}
        if rank == stalled:
            found[rank] = "told" if reached else "no"
            continue
        if stalled in reached:
            found[rank] = "directly"
            continue
        while more := set().union(*(mentions.get(one, set()) for one in reached)) - reached:
            reached |= more
        found[rank] = "by others" if stalled in reached else "no"
    return found


def run_round(world: World, shape: Shape, plan: Plan, random_: random.Random) -> dict[str, Any]:
    world.send(plan)
    gather(world, "ready")
    world.send("go")
    stop = (plan.stalled, plan.moment, plan.seconds) if plan.call == STOPPED and plan.seconds else None
    reports, stopped_at = gather(world, "ended", stop)
    stalled_at = stopped_at if stop is not None else reports[plan.stalled]["stalled_at"]
    outcomes = {rank: report["outcomes"] for rank, report in reports.items()}
    errors = {rank: [one for one in ended if "text" in one] for rank, ended in outcomes.items()}
    failed = {rank: min(found, key=lambda error: error["time"]) for rank, found in errors.items() if found}
    recovers = bool(failed) or random_.random() < 0.5
    world.send(recovers)
    states, _ = gather(world, "recovered")
    times = {rank: found[-1]["time"] for rank, found in errors.items() if found}
    others = [at - stalled_at - TIMEOUT for rank, at in times.items() if rank != plan.stalled]
    own = times[plan.stalled] - stalled_at - plan.seconds if plan.stalled in times else None
    wrong = [one["wrong"] for ended in outcomes.values() for one in ended if one.get("wrong")]
    return {
        "round": plan.number,
        "steps": plan.steps,
        "stalled": plan.stalled,
        "how": "stopped" if stop is not None else f"before call {plan.call}",
        "moment": round(plan.moment, 4) if stop is not None else None,
        "timeouts": round(plan.seconds / TIMEOUT, 2),
        "seconds": round(max(report["ended"] - report["began"] for report in reports.values()), 3),
        "failed": sorted(failed),
        "failures": sum(len(found) for found in errors.values()),
        "checked": sum("wrong" in one for ended in outcomes.values() for one in ended),
        "wrong": wrong + [state["wrong"] for state in states.values() if state["wrong"]],
        "named": names_the_cause(failed, plan.stalled),
        "texts": {rank: f"{error['kind']}: {error['text']}" for rank, error in failed.items()},
        "recovered": recovers,
        "others_after_timeout": round(max(others), 3) if others else None,
        "own_after_stall": round(own, 3) if own is not None else None,
        "states": states,
    }


def run_world(number: int, rounds: int, first: int, random_: random.Random, advance: Callable[[], None]) -> None:
    """Fork ranks, play some rounds without a stall and then `rounds` with one."""
    shape = shape_of(number, random_)
    rows_of(shape.ranks, shape.ranks_per_node)  # before they are forked
    world = World(shape.ranks, be_a_rank, shape)
    about = {"world": number, "shape": shape.__dict__}
    error, kept = None, None
    try:
        gather(world, "recovered")
        without = [Plan(number, ("cached", "echo", "combine"), 0, STOPPED, 0.0, 0.0) for number in range(2)]
        usual = [run_round(world, shape, plan, random_) for plan in without]
        for one in usual:
            print(json.dumps({"kind": "usual", **about, **one}), flush=True)
        seconds = min(one["seconds"] for one in usual)
        for index in range(rounds):
            plan = plan_of(first + index, random_, shape.ranks, seconds)
            print(json.dumps({"kind": "round", **about, **run_round(world, shape, plan, random_)}), flush=True)
            advance()
        world.send(None)
        kept, _ = gather(world, "kept")
        until = time.monotonic() + HUNG_SECONDS
        while world.open and time.monotonic() < until:
            world.messages(0.1)
    except (Hang, RuntimeError) as found:
        error = f"{type(found).__name__}: {found}"
    statuses = world.end()
    left = world.leftovers()
    print(json.dumps({"kind": "end", **about, "error": error, "kept": kept, "statuses": statuses, "left": left}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--worlds", type=int, help="Default: at least 3, of at most 25 rounds each.")
    options = parser.parse_args()
    worlds = options.worlds or max(3, -(-options.rounds // ROUNDS_PER_WORLD))
    # No thread may refresh the bar, because ranks are forked from this process.
    with Progress(console=Console(file=sys.stderr), auto_refresh=False) as progress:
        task = progress.add_task("stalls", total=options.rounds)

        def advance() -> None:
            progress.advance(task)
            progress.refresh()

        for number in range(worlds):
            first, after = (options.rounds * end // worlds for end in (number, number + 1))
            run_world(number, after - first, first + 1, random.Random(options.seed * 1000 + number), advance)


if __name__ == "__main__":
    main()
