"""Four rank processes that use all features of a Buffer for minutes: random shapes, BF16 and FP8, outputs kept and
dropped, calls waited for at once or later, failures and recoveries, Buffers made and destroyed. All results are
checked; kept ones again before they are dropped. The resources that the processes hold are sampled every few seconds
and whenever there is no Buffer: a line of JSON per sample, and one at the end.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

import deep_ep_py as deep_ep
from cases import Case
from forked_ranks import Held, Hub, World, kept_since, memory_of_this_process
from fp8 import KINDS, Fp8Trial
from harness import Trial, dispatch_arguments, make_buffer

torch.set_num_threads(1)  # before anything is computed: threads do not outlive a fork

RANKS = 4
SAMPLE_SECONDS = 5.0
HUNG_SECONDS, OTHERS_SECONDS = 60.0, 5.0
TIMEOUT, SHORT_TIMEOUT = 20.0, 0.3
MAX_KEPT = 8
ROUTINGS = ("uniform", "uniform", "skewed", "holes", "void", "one_rank", "own_rank", "everywhere")
Check = Callable[[], None]


def case_of(random_: random.Random, fp8: bool, ranks_per_node: int | None) -> Case:
    per_rank, routing = random_.randint(1, 8), random_.choice(ROUTINGS)
    most = {"one_rank": per_rank, "own_rank": per_rank, "everywhere": RANKS}.get(routing, per_rank * RANKS)
    return Case(
        "soak",
        RANKS,
        tuple(random_.choice((0, 1, random_.randint(2, 160), random_.randint(2, 160))) for _ in range(RANKS)),
        # Twice as many FP8 elements.
        hidden=random_.choice((16, 64, 264, 512) if fp8 else (8, 64, 264, 512, 1096, 2048)),
        topk=random_.randint(1, min(8, most)),
        experts=per_rank * RANKS,
        routing=routing,
        ranks_per_node=ranks_per_node,
        expert_alignment=1 if fp8 else random_.choice((1, 1, 8)),
    )


def buffer_of(hub: Hub, random_: random.Random) -> tuple[deep_ep.Buffer, int | None, str]:
    """Make one. Returns it with its ranks per node, and a label of what affects its memory."""
    fabric, ranks_per_node = random_.choice(
        (("peer", None), ("peer", None), ("ibgda", 1), ("ibgda", 2), ("weak", None), ("weak", 2))
    )
    options = {
        "num_nvl_bytes": random_.choice((1 << 20, 1 << 22)),
        # None at all; one that is full at times; an ample one.
        "arena_bytes": random_.choice((0, 1 << 20, 1 << 26, 1 << 26)),
        "regions": random_.randint(2, 4),
        "timeout": TIMEOUT,
    }
    case = Case("soak", RANKS, 1, hidden=2048, ranks_per_node=ranks_per_node)
    buffer = make_buffer(None, case, fabric, comm=hub, **options)
    return buffer, ranks_per_node, f"{fabric}, {ranks_per_node or RANKS} ranks per node"


class Soak:
    """One rank. All choices that ranks must make alike are drawn from the same seed."""

    def __init__(self, hub: Hub, random_: random.Random) -> None:
        self.hub, self.random, self.rank = hub, random_, hub.rank
        self.done: Counter[str] = Counter()
        self.kept: list[Check] = []
        self.label = ""
        self.began = self.sampled = time.monotonic()

    def live(self) -> None:
        """Run through the lifetime of a Buffer."""
        buffer, per_node, self.label = buffer_of(self.hub, self.random)
        self.done["Buffers"] += 1
        for _ in range(self.random.randint(3, 40)):
            seed = self.random.randrange(1 << 30)
            if self.random.random() < 0.2:
                kind, ids = self.random.choice(KINDS), self.random.choice((torch.int64, torch.int32))
                Fp8Trial.of(case_of(self.random, True, per_node), kind, ids).round_trip(buffer)
                self.done["FP8 round trips"] += 1
            else:
                self.use(buffer, Trial.of(case_of(self.random, False, per_node), seed))
            if self.random.random() < 0.15:
                self.fail(buffer, per_node)
            if time.monotonic() > self.sampled + SAMPLE_SECONDS:
                self.sample(buffer)
        if self.random.random() < 0.5:
            self.drop(len(self.kept))
            gc.collect()
            used = buffer.stats()["arena_used"]
            assert used == 0, f"{used} bytes of the arena are in use, although no output in it remains"
        buffer.destroy()

    def use(self, buffer: deep_ep.Buffer, trial: Trial) -> None:
        """Make a dispatch, and calls with its handle."""
        rank, random_ = self.rank, self.random
        worst = trial.max_rows + random_.randint(0, 9) if random_.random() < 0.25 else 0
        arguments = dispatch_arguments(trial.work, rank, expert_alignment=trial.case.expert_alignment)
        results = buffer.dispatch(**arguments, num_worst_tokens=worst, async_finish=random_.random() < 0.5)
        handle = results[4]
        if worst:
            self.take(results[5], lambda: trial.check_worst(rank, results, worst))
        else:
            self.take(results[5], lambda: trial.check_dispatch(rank, results))
        queued: list[tuple[Any, Check]] = []
        for _ in range(random_.randint(0, 5)):
            later = random_.random() < 0.5
            if worst:
                queued.append(self.combine_padded(buffer, trial, handle, worst, later))
            elif random_.random() < 0.5:
                queued.append(self.cached(buffer, trial, handle, later))
            else:
                queued.append(self.combine(buffer, trial, handle, later))
            if not later:
                self.take_all(queued)
        self.take_all(queued)

    def cached(self, buffer: deep_ep.Buffer, trial: Trial, handle: Any, later: bool) -> tuple[Any, Check]:
        again = buffer.dispatch(trial.work.x[self.rank], handle=handle, async_finish=later)
        return again[5], lambda: trial.check_cached(self.rank, again)

    def combine(self, buffer: deep_ep.Buffer, trial: Trial, handle: Any, later: bool) -> tuple[Any, Check]:
        biases, weights = self.random.randint(0, 2), self.random.random() < 0.5
        sums = trial.combine(buffer, self.rank, handle, biases, weights, async_finish=later)
        return sums[2], lambda: trial.check_combine(self.rank, sums, biases, weights)

    def combine_padded(
        self, buffer: deep_ep.Buffer, trial: Trial, handle: Any, rows: int, later: bool
    ) -> tuple[Any, Check]:
        sums = buffer.combine(handle=handle, **trial.padded(self.rank, rows), async_finish=later)
        return sums[2], lambda: trial.check_combine(self.rank, sums)

    def take_all(self, queued: list[tuple[Any, Check]]) -> None:
        for event, check in queued:
            self.take(event, check)
        queued.clear()

    def take(self, event: Any, check: Check) -> None:
        """Wait, check, and keep the results for a while, or not."""
        event.current_stream_wait()
        check()
        self.done["results"] += 1
        keeps = self.random.random() < 0.3
        if keeps:
            self.kept.append(check)
        self.drop(max(0, len(self.kept) - MAX_KEPT) + (self.random.random() < 0.25))

    def drop(self, count: int) -> None:
        """Drop some kept results, which must be unchanged."""
        for _ in range(min(count, len(self.kept))):
            self.kept.pop(self.random.randrange(len(self.kept)))()
            self.done["checked again"] += 1

    def fail(self, buffer: deep_ep.Buffer, ranks_per_node: int | None) -> None:
        """One rank fails in some way, with calls in flight. Successful calls have the right results; all recover."""
        case = Case("failing", RANKS, 60, hidden=264, topk=4, experts=16, ranks_per_node=ranks_per_node)
        trial = Trial.of(case, self.random.randrange(1 << 30))
        rank, chosen = self.rank, self.random.randrange(RANKS)
        how = self.random.choice(("abort", "stall", "too few rows", "bad argument"))
        self.done[how] += 1
        arguments = dispatch_arguments(trial.work, rank)
        handle = buffer.dispatch(**arguments)[4]
        self.hub.allgather(None)  # an abort would fail the others' dispatch
        if how == "bad argument":
            if rank == chosen:
                try:
                    buffer.dispatch(**{**arguments, "topk_idx": arguments["topk_idx"][1:]})
                except ValueError:
                    pass
                else:
                    raise AssertionError("a topk_idx of too few tokens was accepted")
            self.take(*self.combine(buffer, trial, handle, later=False))  # nothing was lost
            return
        errors, moment = [], self.random.randrange(3)
        with buffer.timeout_of(SHORT_TIMEOUT):
            queued: list[tuple[Any, Check]] = []
            try:
                if how == "too few rows":
                    few = buffer.dispatch(**arguments, num_worst_tokens=trial.max_rows - 1, async_finish=True)
                    queued.append((few[5], lambda: self.refuse("too few rows")))
                for index in range(3):
                    if how != "too few rows" and rank == chosen and index == moment:
                        buffer.abort() if how == "abort" else time.sleep(2 * SHORT_TIMEOUT)
                    queued.append(self.cached(buffer, trial, handle, later=True))
            except deep_ep.DeepEPError as error:
                errors.append(str(error))
            for event, check in queued:
                try:
                    event.current_stream_wait()
                except deep_ep.DeepEPError as error:
                    errors.append(str(error))
                else:
                    check()
        if how != "stall":  # whose duration depends on the machine too
            assert errors, f"{how}: no exception"
        self.done["exceptions"] += len(errors)
        buffer.recover(timeout=TIMEOUT)

    def refuse(self, what: str) -> None:
        raise AssertionError(f"{what}: expected an exception")

    def sample(self, buffer: deep_ep.Buffer | None = None) -> None:
        """Send the parent a sample of what this process holds."""
        held, now = Held.now(), time.monotonic()
        if buffer is not None:  # many Buffers live for less than the interval, and samples without one occur in between
            self.sampled = now
        self.hub.tell(
            "sample",
            {
                "at": round(now - self.began, 2),
                "quiet": buffer is None,
                "buffer": self.label,
                **{name: round(size, 3) for name, size in memory_of_this_process().items()},
                "descriptors": sum(held.descriptors.values()),
                "threads": held.threads,
                "mappings": held.mappings,
                "heaps": held.heaps,
                "kept": len(self.kept),
            },
        )


def be_a_rank(hub: Hub, seed: int, seconds: float) -> None:
    """Use one Buffer after another until the time is over for all ranks."""
    before = Held.now()
    soak = Soak(hub, random.Random(seed))
    more = True
    while more:
        soak.live()
        soak.drop(len(soak.kept))
        kept = kept_since(before)
        assert not kept, f"held without a Buffer: {kept}"
        soak.sample()
        more = all(hub.allgather(time.monotonic() < soak.began + seconds))
    hub.tell("done", dict(soak.done))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    world = World(RANKS, be_a_rank, options.seed, options.seconds)
    done: dict[int, Any] = {}
    errors: list[str] = []
    heard = began = time.monotonic()
    # No thread may refresh the bar: it would be forked with the ranks.
    with Progress(console=Console(file=sys.stderr), auto_refresh=False) as progress:
        task = progress.add_task("soak", total=options.seconds)
        while world.open and time.monotonic() < heard + (OTHERS_SECONDS if errors else HUNG_SECONDS):
            for rank, kind, value in world.messages(1.0):
                heard = time.monotonic()
                if kind == "sample":
                    print(json.dumps({"kind": "sample", "rank": rank, **value}), flush=True)
                elif kind == "done":
                    done[rank] = value
                else:
                    errors.append(f"rank {rank}: {kind}: {value}")
            progress.update(task, completed=min(time.monotonic() - began, options.seconds))
            progress.refresh()
    if world.open:
        errors.append(f"no message from ranks {sorted(world.open)} for {time.monotonic() - heard:.0f} s")
    statuses = world.end()
    print(json.dumps({"kind": "end", "errors": errors, "done": done, "statuses": statuses, "left": world.leftovers()}))


if __name__ == "__main__":
    main()
