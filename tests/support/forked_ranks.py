"""Ranks forked from a process that has imported everything they need and started no thread: how they meet, what they
report to their parent, which resources they hold and what they leave behind.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import random
import re
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

HEAP_NAME = "memfd:deep_ep_heap"
SETTLE_SECONDS = 3.0


class Hub:
    """The part of an mpi4py communicator that a Buffer needs, routed through the parent."""

    def __init__(self, rank: int, size: int, parent: Connection) -> None:
        self.rank, self.size, self.parent = rank, size, parent

    def Get_rank(self) -> int:  # noqa: N802 - mpi4py's
        return self.rank

    def Get_size(self) -> int:  # noqa: N802
        return self.size

    def allgather(self, value: Any) -> list[Any]:
        self.tell("gather", value)
        values = self.parent.recv()
        if values is None:
            raise ConnectionError("a rank was killed before all ranks had met")
        return values

    def tell(self, kind: str, value: Any = None) -> None:
        """Send the parent a message."""
        self.parent.send((kind, value))


class World:
    """The parent's side of ranks that each run `fn(hub, *args)` in a fork.

    An exception that `fn` does not handle arrives as a message "failed" with the time, the exception's type and its
    text, which ends with the traceback.

    Attributes
    ----------
    pids : list of int
        Process ids by rank.
    open : set of int
        Ranks whose processes have not ended.
    """

    def __init__(self, ranks: int, fn: Callable[..., None], *args: Any) -> None:
        self.ranks = ranks
        self.pids: list[int] = []
        self.connections: list[Connection] = []
        self._gathered: dict[int, Any] = {}
        self._shared_before = _names_in_shm()
        for rank in range(ranks):
            ours, theirs = Pipe()
            pid = os.fork()
            if pid == 0:
                self._be_a_rank(rank, ours, theirs, fn, args)
            theirs.close()
            self.pids.append(pid)
            self.connections.append(ours)
        self.open = set(range(ranks))

    def _be_a_rank(
        self, rank: int, ours: Connection, theirs: Connection, fn: Callable[..., None], args: tuple[Any, ...]
    ) -> None:
        try:
            for connection in (ours, *self.connections):
                connection.close()
            fn(Hub(rank, self.ranks, theirs), *args)
        except BaseException as error:  # noqa: B036 - a fork must not continue as its parent
            text = f"{error}\n{traceback.format_exc()}"
            with suppress(OSError):
                theirs.send(("failed", (time.monotonic(), type(error).__name__, text)))
        os._exit(0)

    def messages(self, seconds: float) -> list[tuple[int, str, Any]]:
        """Wait up to `seconds` for messages, answer those of `Hub.allgather` and return the others with their ranks."""
        found = []
        by_connection = {self.connections[rank]: rank for rank in self.open}
        for connection in wait(list(by_connection), timeout=seconds):
            rank = by_connection[connection]  # type: ignore[index]
            try:
                kind, value = self.connections[rank].recv()
            except (EOFError, ConnectionResetError):
                self.open.discard(rank)
                continue
            if kind == "gather":
                self._gathered[rank] = value
            else:
                found.append((rank, kind, value))
        if len(self._gathered) == self.ranks:
            self._answer([self._gathered[rank] for rank in range(self.ranks)])
        elif self._gathered and len(self.open) < self.ranks:
            self._answer(None)
        return found

    def _answer(self, values: Any) -> None:
        for rank in self._gathered:
            with suppress(BrokenPipeError):  # killed in the meantime
                self.connections[rank].send(values)
        self._gathered.clear()

    def send(self, value: Any) -> None:
        """Send all ranks a message, for their `hub.parent.recv()`."""
        for connection in self.connections:
            with suppress(BrokenPipeError):
                connection.send(value)

    def end(self) -> list[int]:
        """Kill the remaining ranks and return the exit status of each process, as from `os.waitpid`."""
        for rank in self.open:
            os.kill(self.pids[rank], signal.SIGKILL)
        statuses = [os.waitpid(pid, 0)[1] for pid in self.pids]
        for connection in self.connections:
            connection.close()
        return statuses

    def leftovers(self, seconds: float = SETTLE_SECONDS) -> list[str]:
        """Name what the ranks have left behind once they and their children have ended."""
        until = time.monotonic() + seconds
        while (found := self._leftovers()) and time.monotonic() < until:
            time.sleep(0.05)
        return found

    def _leftovers(self) -> list[str]:
        lines = Path("/proc/net/unix").read_text().splitlines()
        names = [line.split()[-1] for line in lines if "@deep_ep_py-" in line]
        sockets = [name for name in names if int(name.split("-")[1]) in self.pids]
        processes = [f"process {pid}" for pid in self.pids if Path(f"/proc/{pid}").exists()]
        return sockets + processes + sorted(_names_in_shm() - self._shared_before)


def run_scenarios(ranks: int, *scenarios: Callable[[Hub], None], seconds: float = 20.0) -> None:
    """Run functions of a Hub one after the other, each on fresh ranks that send their parent a message when they
    end."""
    for scenario in scenarios:
        until, ended = time.monotonic() + seconds, set()
        world = World(ranks, scenario)
        while len(ended) < ranks and time.monotonic() < until:
            for rank, kind, value in world.messages(0.1):
                if kind == "failed":
                    sys.exit(f"{scenario.__name__}, rank {rank}: {value}")
                ended.add(rank)
        world.end()
        if len(ended) < ranks:
            sys.exit(f"{scenario.__name__}: ranks {sorted({*range(ranks)} - ended)} have not ended")


def _names_in_shm() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


@dataclass(frozen=True)
class Held:
    """The resources that this process holds.

    Attributes
    ----------
    descriptors : dict
        Counts by kind: "socket", "pipe", ...
    heaps, mappings : int
        Mappings of Buffers' shared memory, and all mappings.
    threads : int
        Threads of the process.
    """

    descriptors: dict[str, int]
    heaps: int
    mappings: int
    threads: int

    @staticmethod
    def now() -> Held:
        kinds: Counter[str] = Counter()
        for descriptor in os.listdir("/proc/self/fd"):
            with suppress(OSError):  # the listing's own descriptor is closed by now
                kinds[re.split(r":\[|\d", os.readlink(f"/proc/self/fd/{descriptor}"))[0]] += 1
        mappings = Path("/proc/self/maps").read_text().splitlines()
        heaps = sum(HEAP_NAME in line for line in mappings)
        return Held(dict(sorted(kinds.items())), heaps, len(mappings), len(os.listdir("/proc/self/task")))

    def less(self, before: Held) -> dict[str, Any]:
        """Return the resources that a Buffer should have released, or should not have acquired; empty if nothing
        changed."""
        kinds = {*self.descriptors, *before.descriptors}
        changes = {kind: self.descriptors.get(kind, 0) - before.descriptors.get(kind, 0) for kind in sorted(kinds)}
        changes |= {"heaps": self.heaps - before.heaps, "threads": self.threads - before.threads}
        return {name: count for name, count in changes.items() if count}


def kept_since(before: Held, seconds: float = SETTLE_SECONDS) -> dict[str, Any]:
    """Collect garbage, give threads time to end, and return what this process holds beyond what it held before."""
    until = time.monotonic() + seconds
    gc.collect()
    while (kept := Held.now().less(before)) and time.monotonic() < until:
        time.sleep(0.02)
    return kept


def memory_of_this_process() -> dict[str, float]:
    """Return sizes in MiB: `anonymous`, including pages still shared with the parent; `private`, this process's
    share of those; `shared`, its share of Buffers' memory. Freed memory that the C library keeps is excluded.
    """
    gc.collect()
    _trim(0)
    sizes = {}
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]:
        name, amount, _ = line.split()
        sizes[name.rstrip(":")] = int(amount) / 1024
    return {"anonymous": sizes["Anonymous"], "private": sizes["Pss_Anon"], "shared": sizes["Pss_Shmem"]}


_trim = getattr(ctypes.CDLL(None), "malloc_trim", lambda kept: 0)
"""From glibc; other C libraries keep less."""


def print_trials(doc: str | None, what: str, run_trial: Callable[[random.Random, int], dict[str, Any]]) -> None:
    """Run as many trials as the command line asks for, from a seed, and print a line of JSON for each."""
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("--trials", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    random_ = random.Random(options.seed)
    # No thread may refresh the bar, because ranks are forked from this process.
    for number in track(range(options.trials), what, console=Console(file=sys.stderr), auto_refresh=False):
        print(json.dumps(run_trial(random_, number)), flush=True)
