"""Runs over the stand-in for the driver: an arena that begins too small grows by what calls have lacked (P10). Under
torchrun ranks are processes, which map each other's pieces; otherwise threads, which share them.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import pretend_gpu
from cases import Case
from deep_ep_py import Buffer, DeepEPError
from deep_ep_py.base.native import C
from deep_ep_py.testing import run_ranks
from harness import Trial, dispatch_arguments, make_buffer
from pretend_gpu import PretendGpu

GRANULARITY = 2 << 20
RANKS = 3
# The heap's first piece holds everything before the arena, and 40 KiB of it. Each rank receives some 60 KiB.
CASE = Case("grows", RANKS, 48, hidden=512, topk=2, experts=2 * RANKS, num_nvl_bytes=GRANULARITY - (48 << 10))
TRIALS = [Trial.of(CASE, seed) for seed in (1, 2, 3)]
FIRST, MOST = 32 << 10, 2 * GRANULARITY


class Ranks:
    """A rank's view of a scenario, besides its Buffer."""

    def __init__(self, group: Any, processes: bool) -> None:
        self.group, self.processes = group, processes
        self.rank: int = group.rank()

    def barrier(self) -> None:
        dist.barrier() if self.processes else self.group.barrier()

    def make_buffer(self, **options: Any) -> Buffer:
        return make_buffer(self.group, CASE, "peer", device="cuda", **{"arena_bytes": None, **options})

    def mapped(self) -> int:
        """Return how many pieces, including first ones and trials, all processes have mapped from others so far."""
        self.barrier()
        count = Path(os.environ["DOUBLE_LOG"]).read_text().count("cuMemImportFromShareableHandle")
        self.barrier()
        return count


def dispatch(buffer: Buffer, trial: Trial, **options: Any) -> tuple[Any, ...]:
    results = buffer.dispatch(**dispatch_arguments(trial.work, buffer.rank), **options)
    rows = options.get("num_worst_tokens")
    trial.check_worst(buffer.rank, results, rows) if rows else trial.check_dispatch(buffer.rank, results)
    return results


def how(buffer: Buffer, call: Callable[[], Any]) -> str:
    """Return whether a call's rows went directly to their destination."""
    before = buffer.stats()
    call()
    after = buffer.stats()
    assert after["direct"] + after["rounds"] == before["direct"] + before["rounds"] + 1
    return "direct" if after["direct"] > before["direct"] else "rounds"


def all_pieces(ranks: Ranks, growths: int) -> int:
    """Return the number of mappings if every rank has grown so often, including the trial before the first piece.

    Threads share heaps, so they map none.
    """
    return (2 + growths) * RANKS * (RANKS - 1) if ranks.processes else 0


def grows(ranks: Ranks) -> None:
    """A call that does not fit at first takes rounds; calls are direct from the next dispatch on whose counts the host
    waits for. Outputs outlive the Buffers.
    """
    kept = fill(ranks)
    ranks.barrier()
    for trial, results in kept:
        trial.check_dispatch(ranks.rank, results)


def fill(ranks: Ranks) -> list[tuple[Trial, tuple[Any, ...]]]:
    rank, trial, other = ranks.rank, TRIALS[0], TRIALS[1]
    max_rows = max(trial.max_rows, other.max_rows)
    before = ranks.mapped()
    buffer = ranks.make_buffer()
    least = buffer.stats()["arena_bytes"]
    assert 32 << 10 < least < 48 << 10 and buffer.stats()["arena_growths"] == 0
    kept: list[tuple[Trial, tuple[Any, ...]]] = []

    def call(trial: Trial, **options: Any) -> Callable[[], None]:
        return lambda: kept.append((trial, dispatch(buffer, trial, **options)))

    assert how(buffer, call(trial)) == "rounds"
    assert buffer.stats()["arena_growths"] == 1 and buffer.stats()["arena_bytes"] == least + GRANULARITY
    handle = kept[0][1][4]
    assert how(buffer, lambda: trial.check_combine(rank, trial.combine(buffer, rank, handle))) == "rounds"
    # The host waits in none of these, so no rank maps the pieces that exist.
    again = trial.work.x[rank]
    assert how(buffer, lambda: trial.check_cached(rank, buffer.dispatch(again, handle=handle))) == "rounds"
    assert how(buffer, lambda: dispatch(buffer, other, num_worst_tokens=max_rows)) == "rounds"
    buffer.warmup(CASE.hidden, CASE.topk)  # ranks meet over the sockets that carry the pieces
    graph = pretend_gpu.Graph()
    with graph.capture():
        in_graph, kept_by_graph = dispatch_in_graph(buffer, other, max_rows)
    graph.replay()
    other.check_worst(rank, in_graph, max_rows)
    assert ranks.mapped() - before == all_pieces(ranks, 0)

    assert how(buffer, call(other)) == "direct"
    assert ranks.mapped() - before == all_pieces(ranks, 1)
    assert how(buffer, lambda: trial.check_combine(rank, trial.combine(buffer, rank, handle))) == "direct"
    assert how(buffer, lambda: trial.check_cached(rank, buffer.dispatch(again, handle=handle))) == "direct"
    assert how(buffer, lambda: dispatch(buffer, other, num_worst_tokens=max_rows)) == "direct"
    graph.replay()
    other.check_worst(rank, in_graph, max_rows)
    del kept_by_graph
    assert buffer.stats()["arena_growths"] == 1

    # Until the arena is full of kept outputs; it never grows beyond its maximum.
    seen = []
    for turn in range(60):
        seen.append(how(buffer, call(TRIALS[turn % 3])))
        assert least < buffer.stats()["arena_bytes"] <= MOST
    assert "rounds" not in seen[:10] and seen.count("rounds") > 5 and set(seen[-5:]) == {"rounds"}, seen
    assert buffer.stats()["arena_bytes"] == MOST and buffer.stats()["arena_growths"] == 2
    del kept[10:20]
    assert how(buffer, call(trial)) == "direct", "released memory is available again"
    for trial, results in kept:
        trial.check_dispatch(rank, results)
    buffer.destroy()
    return kept


def dispatch_in_graph(buffer: Buffer, trial: Trial, rows: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return its results, and the inputs of each replay, which a graph's pool would keep alive."""
    arguments = dispatch_arguments(trial.work, buffer.rank)
    return buffer.dispatch(**arguments, num_worst_tokens=rows), arguments


def announced_by_the_next(ranks: Ranks) -> None:
    """Memory that an operation has lacked is not announced by one that was begun earlier."""
    buffer, rank = ranks.make_buffer(), ranks.rank
    pending = []

    def begin(trial: Trial) -> None:
        pending.append((trial, buffer._begin_dispatch(**dispatch_arguments(trial.work, rank), finish_later=True)))

    def finish() -> None:
        trial, begun = pending.pop(0)
        trial.check_dispatch(rank, begun.finish())

    begin(TRIALS[0])
    begin(TRIALS[1])
    assert how(buffer, finish) == "rounds"
    begin(TRIALS[2])
    assert [how(buffer, finish) for _ in range(2)] == ["rounds", "direct"]


def dropped(ranks: Ranks) -> None:
    """Buffers released by their last reference, with a piece announced to no rank, or taken by none."""
    for received in (False, True):
        buffer = ranks.make_buffer()
        dispatch(buffer, TRIALS[0])
        dispatch(buffer, TRIALS[0], num_worst_tokens=TRIALS[0].max_rows)  # hands it over
        if received:
            buffer.warmup(CASE.hidden, CASE.topk)
        ranks.barrier()


def all_at_once(ranks: Ranks) -> None:
    """An explicit size is used as it is."""
    buffer = ranks.make_buffer(arena_bytes=32 << 10)
    assert [how(buffer, lambda: dispatch(buffer, TRIALS[0])) for _ in range(3)] == ["rounds"] * 3
    assert buffer.stats()["arena_growths"] == 0
    ranks.barrier()
    buffer = ranks.make_buffer(arena_bytes=1 << 20)
    assert buffer.stats()["arena_bytes"] == 1 << 20 and how(buffer, lambda: dispatch(buffer, TRIALS[0])) == "direct"
    ranks.barrier()
    with pytest.raises(ValueError, match="arena_bytes=.*expected the same on all ranks"):
        ranks.make_buffer(arena_bytes=1 << (20 if ranks.rank == 0 else 21))
    with pytest.raises(ValueError, match="arena_bytes=.*expected the same on all ranks"):
        ranks.make_buffer(arena_bytes=1 << 20 if ranks.rank == 0 else None)
    ranks.barrier()


def what_suits_all(ranks: Ranks) -> None:
    """Without an explicit size, the minimum over the ranks' devices is used."""
    usual = ranks.make_buffer().stats()["arena_bytes"]
    if ranks.rank != 0:
        PretendGpu.first_arena_bytes += GRANULARITY
    assert ranks.make_buffer().stats()["arena_bytes"] == usual
    if ranks.rank != 0:
        PretendGpu.first_arena_bytes -= GRANULARITY


def no_more_memory(ranks: Ranks) -> None:
    """While the GPU has no memory left, calls take rounds."""
    buffer = ranks.make_buffer()
    with failing("cuMemCreate=2"):
        for _ in range(2):
            assert how(buffer, lambda: dispatch(buffer, TRIALS[0])) == "rounds"
        assert buffer.stats()["arena_growths"] == 0
        ranks.barrier()  # threads share an environment
    ranks.barrier()
    assert [how(buffer, lambda: dispatch(buffer, TRIALS[0])) for _ in range(2)] == ["rounds", "direct"]


def little_more_memory(ranks: Ranks) -> None:
    """If the GPU cannot add a quarter of the current size, it may still have enough for what is missing."""
    PretendGpu.first_arena_bytes, PretendGpu.max_arena_bytes = 6 * GRANULARITY, 12 * GRANULARITY
    ranks.barrier()
    buffer = ranks.make_buffer()
    ranks.barrier()
    PretendGpu.first_arena_bytes, PretendGpu.max_arena_bytes = FIRST, MOST
    allocate, free = pretend_gpu.pool_functions()
    first = buffer.stats()["arena_bytes"]
    assert first > 4 * GRANULARITY
    sizes = first, 1 << 10, GRANULARITY
    with C.cuda.pool_over(buffer._engine.runtime, grows=True), failing(f"{GRANULARITY}", "DOUBLE_LARGEST"):
        blocks = [allocate(size, 0, None) for size in sizes]
        assert all(blocks) and buffer.stats()["arena_bytes"] == first + 2 * GRANULARITY
        assert allocate(2 * GRANULARITY, 0, None) is None, "there is not that much"
        ranks.barrier()  # threads share an environment
    ranks.barrier()
    for address, size in zip(blocks, sizes, strict=True):
        free(address, size, 0, None)


def no_host_waits(ranks: Ranks) -> None:
    """Calls whose host waits for no counts can announce nothing, so no memory is added for them."""
    buffer, trial, rank = ranks.make_buffer(), TRIALS[0], ranks.rank
    for _ in range(2):
        results = dispatch(buffer, trial, num_worst_tokens=trial.max_rows)
        buffer.combine(results[0], results[4])
        buffer.dispatch(trial.work.x[rank], handle=results[4])
    assert buffer.stats()["rounds"] == 6 and buffer.stats()["arena_growths"] == 0
    dispatch(buffer, trial)
    assert buffer.stats()["arena_growths"] == 1
    ranks.barrier()


class failing:  # noqa: N801 - reads as a statement
    """A context in which a call of the driver fails."""

    def __init__(self, call: str, how: str = "DOUBLE_FAIL") -> None:
        self.call, self.how = call, how

    def __enter__(self) -> None:
        os.environ[self.how] = self.call

    def __exit__(self, *_: Any) -> None:
        os.environ.pop(self.how, None)


def cannot_be_handed_over(ranks: Ranks) -> None:
    """A piece without a descriptor is not announced."""
    buffer = ranks.make_buffer()
    dispatch(buffer, TRIALS[0])
    with failing("cuMemExportToShareableHandle=2"):
        assert how(buffer, lambda: dispatch(buffer, TRIALS[0])) == "rounds"
    assert how(buffer, lambda: dispatch(buffer, TRIALS[0])) == "direct"


def cannot_be_mapped(ranks: Ranks) -> None:
    """Mapping fails on one rank: all raise. Once they have recovered, the piece is announced again before it is
    used."""
    buffer, rank, trial = ranks.make_buffer(), ranks.rank, TRIALS[0]
    dispatch(buffer, trial)
    ranks.barrier()
    if rank == 1:
        with failing("cuMemImportFromShareableHandle=2"), pytest.raises(DeepEPError) as info:
            dispatch(buffer, trial)
        assert f"rank 1: {GRANULARITY} more bytes of rank 0's memory for outputs cannot be mapped" in str(info.value)
    else:
        with pytest.raises(DeepEPError, match="rank 1") as info:
            buffer.dispatch(**dispatch_arguments(trial.work, rank))  # its kernels fail, and the next call reports it
            dispatch(buffer, trial)
        assert "because rank 1" in str(info.value), info.value
    with pytest.raises(DeepEPError, match="is broken"):
        dispatch(buffer, trial)
    ranks.barrier()
    device = buffer._engine.device
    device.asynchronous = False  # on a GPU it is not available
    buffer.recover()
    device.asynchronous = True
    assert how(buffer, lambda: dispatch(buffer, trial, num_worst_tokens=trial.max_rows)) == "rounds"
    handles = []
    assert how(buffer, lambda: handles.append(dispatch(buffer, trial)[4])) == "direct"
    assert how(buffer, lambda: dispatch(buffer, trial, num_worst_tokens=trial.max_rows)) == "direct"
    trial.check_combine(rank, trial.combine(buffer, rank, handles[0]))


SCENARIOS = (grows, announced_by_the_next, dropped, no_more_memory, little_more_memory, no_host_waits)
BETWEEN_PROCESSES = (all_at_once, what_suits_all, cannot_be_handed_over, cannot_be_mapped)


def on_threads(group: Any, scenario: Callable[[Ranks], None]) -> None:
    scenario(Ranks(group, processes=False))


def held() -> tuple[list[str], int]:
    """Return the descriptors that a Buffer opens, and how many of the driver's objects have not been released."""
    gc.collect()
    unix = {line.split()[6] for line in Path("/proc/net/unix").read_text().splitlines()[1:]}
    opened = []
    for file in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # this folder's own descriptor
            target = os.readlink(file)
            if "memfd:" in target or "pidfd" in target or target.removeprefix("socket:[").removesuffix("]") in unix:
                opened.append(target)
    return sorted(opened), ctypes.CDLL("libcuda.so.1").double_alive()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--processes", action="store_true")
    processes = parser.parse_args().processes
    pretend_gpu.install(compile_kernels=False)
    PretendGpu.first_arena_bytes, PretendGpu.max_arena_bytes = FIRST, MOST
    torch.set_num_threads(1)
    Path(os.environ["DOUBLE_LOG"]).touch()
    if processes:
        dist.init_process_group("gloo")
    for scenario in SCENARIOS + (BETWEEN_PROCESSES if processes else ()):
        before = held()
        if processes:
            scenario(Ranks(dist.group.WORLD, processes=True))
            dist.barrier()
        else:
            run_ranks(RANKS, on_threads, scenario, device="cuda")
        after = held()
        assert after == before, (scenario.__name__, before, after)
        if not processes or dist.get_rank() == 0:
            print(scenario.__name__, flush=True)
    if processes:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
