"""Ranks as threads of one process, scheduled from a seed: `run_ranks`."""

from __future__ import annotations

import gc
import itertools
import os
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from deep_ep_py.base import arguments
from deep_ep_py.base.native import C
from deep_ep_py.errors import PeerFailed, SimtError
from deep_ep_py.testing.free_ranks import FreeWorld, add_note, run_free

DEFAULT_FREEZE = 512
_group_numbers = itertools.count()


class RankResults(list):
    """The results of `run_ranks`, by rank.

    Attributes
    ----------
    event_hash : int
        Hash of all decisions of the schedule, equal for equal runs; 0 on a GPU, where the executor does not schedule.
    stats : dict of str to int
        Counters of the executor: switches, launches, peak_fibers, collectives, barriers, clock_jumps.
    """

    def __init__(self, results: list[Any], stats: dict[str, int]) -> None:
        super().__init__(results)
        self.stats = stats
        self.event_hash = stats.get("event_hash", 0)


@dataclass
class _Meeting:
    """A collective of the group, from the arrival of the first rank on."""

    kind: str
    event: int
    values: list[Any]
    arrived: int = 0
    left: int = 0


@dataclass
class _World:
    """State that the ranks share. It needs no lock: one rank's thread runs at a time, and only native waits switch."""

    size: int
    meetings: dict[int, _Meeting] = field(default_factory=dict)
    failed: int | None = None
    one_launch: None = None

    def meet(self, rank: int, number: int, kind: str, value: Any) -> list[Any]:
        what = f"{kind}, collective {number}"
        meeting = self.meetings.get(number)
        if meeting is None:
            meeting = self.meetings[number] = _Meeting(kind, C.executor.new_event(), [None] * self.size)
        if meeting.kind != kind:
            raise RuntimeError(f"rank {rank} calls {kind}, another rank {meeting.kind}, as collective {number}")
        meeting.values[rank] = value
        meeting.arrived += 1
        if meeting.arrived == self.size:
            C.executor.set_event(meeting.event)
        elif self.failed is not None:
            raise PeerFailed(self.failed, what)
        C.executor.wait_event(meeting.event, what)
        if meeting.arrived != self.size:
            assert self.failed is not None
            raise PeerFailed(self.failed, what)
        meeting.left += 1
        if meeting.left == self.size:
            del self.meetings[number]
        return meeting.values

    def fail(self, rank: int) -> None:
        """Keep the other ranks from waiting for a rank that has failed."""
        if self.failed is None:
            self.failed = rank
        for meeting in self.meetings.values():
            if meeting.arrived != self.size:
                C.executor.set_event(meeting.event)


class ThreadGroup:
    """A process group of ranks that are threads; it passes objects by reference.

    `run_ranks` makes one per rank. All methods except `rank` and `size` are collective.

    Attributes
    ----------
    group_name : str
        A name that is unique to this object, so that ranks of one process are not confused.
    one_launch : OneLaunch or None
        Where the ranks launch together, if they do.
    """

    def __init__(self, world: _World | FreeWorld, rank: int) -> None:
        self._world = world
        self._rank = rank
        self._collectives = 0
        self.group_name = f"rank {rank}, group {next(_group_numbers)} of this process"
        self.one_launch = world.one_launch

    def rank(self) -> int:
        """Return the calling rank."""
        return self._rank

    def size(self) -> int:
        """Return the number of ranks."""
        return self._world.size

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Return every rank's object, by rank."""
        return list(self._meet("all_gather_object", obj))

    def broadcast_object(self, obj: Any, src: int = 0) -> Any:
        """Return the object of rank `src`."""
        return self._meet("broadcast_object", obj)[src]

    def barrier(self) -> None:
        """Wait until all ranks have called this."""
        self._meet("barrier", None)

    def _meet(self, kind: str, value: Any) -> list[Any]:
        self._collectives += 1
        return self._world.meet(self._rank, self._collectives, kind, value)


def sleep(seconds: float) -> None:
    """Suspend the host of the calling rank, by the clock that kernels see; only on a CPU.

    In `run_ranks` the clock is virtual, so this takes no time, and waits of other ranks may time out meanwhile.
    """
    C.executor.sleep(seconds)


def run_ranks(
    n: int,
    fn: Callable[..., Any],
    *args: Any,
    seed: int = 0,
    freeze: int = DEFAULT_FREEZE,
    device: str = "cpu",
    one_launch: bool = False,
    **kwargs: Any,
) -> RankResults:
    """Run `fn(group, *args, **kwargs)` on `n` ranks that are threads of this process.

    One rank's thread runs at a time; kernels run while all of them wait. The seed determines which rank thread or
    kernel thread runs next, so a run can be repeated exactly. The clock is virtual: when nothing can run, it jumps to
    the next deadline, so a timeout takes no time. Deadlocks are detected and reported.

    Parameters
    ----------
    n : int
        Number of ranks.
    fn : callable
        Called on each rank's thread, with a `ThreadGroup` as its first argument. It must be deterministic and must not
        start threads that use the library. torch's global random number generator is seeded with `seed` for the run.
    *args, **kwargs
        Passed to `fn`; every rank gets the same objects.
    seed : int
        0: first come, first served. Any other value: a random schedule. The environment variable `DEEP_EP_SEED`
        overrides it, to replay a failure.
    freeze : int
        In a random schedule, one wake-up in `freeze` suspends a whole warp for long. 0: never.
    device : str
        "cpu" or "cuda". With "cuda", the ranks run on one GPU, each with a stream of its own and its share of the SMs.
        Their threads and kernels then run freely, and time is real: `seed` only seeds torch, and `freeze` has no
        effect.
    one_launch : bool
        On "cuda", whether the ranks' launches of a kernel become one launch of all their blocks, on one stream. This is
        for tools that do not let two kernels run side by side, such as compute-sanitizer, under which the ranks would
        otherwise wait for each other forever. Every call of a Buffer is then collective, including
        `get_dispatch_layout`, with equal sizes and `Config`, and cannot be captured into a graph. If a rank does not
        arrive within the Buffer's timeout, or arrives with another kernel, all ranks raise.

    Returns
    -------
    RankResults
        The results of `fn` by rank, with `event_hash` and `stats`.

    Raises
    ------
    ValueError
        `one_launch` is set on a device other than "cuda".
    DeadlockError, SimtError
        Nothing can run any longer, or a kernel violates a rule of the SIMT machine.
    Exception
        The exception that the first rank to fail raised in `fn`. Its notes name the other ranks that raised; its
        attribute `rank_exceptions` has all exceptions by rank.
    """
    if not callable(fn):
        raise TypeError(f"fn={arguments.describe(fn)}: expected a function of a ThreadGroup")
    if one_launch and torch.device(device).type == "cpu":
        raise ValueError(f"one_launch=True: expected device='cuda', not {device!r}")
    if torch.device(device).type != "cpu":
        torch.manual_seed(seed)
        free, failed = run_free(n, lambda world, rank: fn(ThreadGroup(world, rank), *args, **kwargs), one_launch)
        if failed:
            raise _chosen(failed, seed)
        return RankResults(free, {})
    seed = int(os.environ.get("DEEP_EP_SEED", seed))
    world = _World(n)
    results: list[Any] = [None] * n
    errors: dict[int, BaseException] = {}

    ended: queue.SimpleQueue[int] = queue.SimpleQueue()

    def call(rank: int) -> None:
        try:
            results[rank] = fn(ThreadGroup(world, rank), *args, **kwargs)
        except BaseException as error:  # noqa: B036 - handed to the caller of run_ranks
            errors[rank] = error
            world.fail(rank)

    def body(rank: int) -> None:
        try:
            C.executor.world_enter(rank, number)
        except SimtError:  # the run was aborted before this rank began, or has ended
            pass
        else:
            call(rank)
            C.executor.world_leave(rank)
        ended.put(rank)

    threads = [threading.Thread(target=body, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(n)]
    number = C.executor.world_begin(n, seed, freeze)
    # A garbage collection at an arbitrary point could destroy a Buffer there, but elsewhere in a replay.
    collecting = gc.isenabled()
    gc.disable()
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            _run(threads, ended, number)
        stats = _end_world(seed, abandon=bool(errors))
    finally:
        if collecting:
            gc.enable()
    if errors:
        raise _chosen(errors, seed)
    return RankResults(results, stats)


def _run(threads: list[threading.Thread], ended: queue.SimpleQueue[int], number: int) -> None:
    """Start the threads and wait for them; not with `join`, which takes an interrupted thread for ended."""
    running = 0
    try:
        for thread in threads:
            thread.start()
            running += 1
        while running:
            ended.get()
            running -= 1
    except BaseException:  # Ctrl-C, or a test's timeout
        C.executor.world_abort(number, "run_ranks was interrupted")
        while running:
            ended.get()
            running -= 1
        C.executor.world_end(True)
        raise
    for thread in threads:
        thread.join()


def _end_world(seed: int, abandon: bool) -> dict[str, int]:
    try:
        return C.executor.world_end(abandon)
    except Exception as error:
        add_note(error, f"replay with seed={seed}")
        raise


def _chosen(errors: dict[int, BaseException], seed: int) -> BaseException:
    """Return the exception to raise: that of the rank that failed first, since others may have failed because of it.

    A rank that was notified of a failure may raise before the rank that notified it.
    """

    def follows(error: BaseException) -> bool:
        return isinstance(error, PeerFailed) or getattr(error, "told_by", None) is not None

    rank = next(iter([rank for rank, error in errors.items() if not follows(error)] or errors))
    error = errors[rank]
    error.rank_exceptions = dict(sorted(errors.items()))  # type: ignore[attr-defined]
    others = [other for other in sorted(errors) if other != rank]
    add_note(error, f"raised by rank {rank}" + (f"; ranks {others} raised too" if others else ""))
    add_note(error, f"replay with seed={seed}")
    return error
