"""Two ranks as processes, whose children end in all the ways that Python's do; prints a line of JSON per way.

Run with a rank and a file descriptor connected to the parent; without arguments, it is that parent.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

import deep_ep_py as deep_ep
from cases import Case
from deep_ep_py.base.native import C
from forked_ranks import Hub
from harness import Trial, dispatch_arguments, make_buffer, round_trip

RANKS = 2
SECONDS = 40.0
TRIAL = Trial.of(Case("forked", RANKS, 24, hidden=64, topk=2, experts=2 * RANKS, arena_bytes=1 << 20))


def check_refused(buffer: deep_ep.Buffer, handle: Any, rank: int, maker: int) -> None:
    """Make a Buffer's calls in a child: each must report why it is not possible."""
    calls: dict[str, Callable[[], Any]] = {
        "layout": lambda: buffer.get_dispatch_layout(TRIAL.work.topk_idx[rank], TRIAL.work.num_experts),
        "dispatch": lambda: buffer.dispatch(**dispatch_arguments(TRIAL.work, rank)),
        "combine": lambda: TRIAL.combine(buffer, rank, handle),
        "stats": buffer.stats,
        "warmup": lambda: buffer.warmup(64, 2),
        "lost_ranks": buffer.lost_ranks,
        "recover": buffer.recover,
        "timeout_of": lambda: buffer.timeout_of(5.0).__enter__(),
        "abort": buffer.abort,
    }
    for name, call in calls.items():
        try:
            call()
        except deep_ep.DeepEPError as error:
            expected = f"this Buffer belongs to process {maker}; it cannot be used in a forked child"
            assert expected in str(error), (name, error)
        else:
            raise AssertionError(f"{name} succeeded in a child")


class Child:
    """A child that does everything that could act for its parent, then ends."""

    def __init__(self, buffer: deep_ep.Buffer, rank: int) -> None:
        self.buffer: deep_ep.Buffer | None = buffer
        self.handle = buffer.dispatch(**dispatch_arguments(TRIAL.work, rank))[4]
        TRIAL.check_combine(rank, TRIAL.combine(buffer, rank, self.handle))
        self.rank, self.maker = rank, os.getpid()

    def __call__(self) -> None:
        assert self.buffer is not None
        check_refused(self.buffer, self.handle, self.rank, self.maker)
        self.buffer.destroy()
        self.buffer = self.handle = None
        gc.collect()


class Numbers(Dataset):
    """A dataset loaded by workers that are forked from a rank."""

    def __init__(self, child: Child) -> None:
        self.child = child

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        child = self.child
        if child.buffer is not None:
            child()
        return index


def by_fork(child: Child) -> None:
    """End as a program does, with everything that runs at exit."""
    pid = os.fork()
    if pid == 0:
        try:
            child()
        except Exception:
            traceback.print_exc()
            sys.exit(1)
        sys.exit(0)
    assert os.waitpid(pid, 0)[1] == 0, "a forked child failed"


def by_process(child: Child) -> None:
    """End as a `multiprocessing.Process` does."""
    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join()
    assert process.exitcode == 0, "a forked Process failed"


def by_loader(child: Child) -> None:
    """End as a worker of a DataLoader does."""
    loader = DataLoader(Numbers(child), num_workers=2, multiprocessing_context="fork")
    assert sorted(int(number) for number in loader) == [0, 1]


def by_a_dying_body(child: Child) -> None:
    """End in the body of a `with` statement, by an exception that the child must not report to other ranks."""
    assert child.buffer is not None
    pid = os.fork()
    if pid == 0:
        with child.buffer:
            sys.exit(3)
    assert os.waitpid(pid, 0)[1] >> 8 == 3, "the exception in the body did not end the child"


TRIALS = (
    ("fork", "peer", by_fork),
    ("fork", "ibgda", by_fork),  # with a thread that acts as a NIC
    *((("fork", "proxy", by_fork),) if C.proxy_providers() else ()),  # with a thread, and a network's sockets
    ("Process", "peer", by_process),
    ("DataLoader", "peer", by_loader),
    ("with", "peer", by_a_dying_body),
)


def be_a_rank(rank: int, parent: Connection) -> None:
    """Make a Buffer for each way; rank 0's child ends while rank 0 has a dispatch in flight, then everything
    continues."""
    hub = Hub(rank, RANKS, parent)
    for name, fabric, way in TRIALS:
        error = None
        try:
            buffer = make_buffer(None, TRIAL.case, fabric, comm=hub, timeout=SECONDS / 4)
            child = Child(buffer, rank)
            if rank == 0:
                results = buffer.dispatch(handle=child.handle, x=TRIAL.work.x[0], async_finish=True)
                way(child)
            hub.allgather(None)
            if rank == 1:
                results = buffer.dispatch(handle=child.handle, x=TRIAL.work.x[1], async_finish=True)
            results[-1].current_stream_wait()
            TRIAL.check_cached(rank, results)
            round_trip(buffer, rank, TRIAL, 2)
            buffer.destroy()
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
        hub.tell("ended", {"fabric": fabric, "way": name, "rank": rank, "error": error})
        hub.allgather(None)


def run_ranks() -> None:
    """Start the ranks, connect them, and print their outcomes."""
    connections, processes = [], []
    for rank in range(RANKS):
        ours, theirs = Pipe()
        command = [sys.executable, __file__, str(rank), str(theirs.fileno())]
        processes.append(subprocess.Popen(command, pass_fds=[theirs.fileno()], start_new_session=True))
        theirs.close()
        connections.append(ours)
    until = time.monotonic() + SECONDS
    gathered: dict[int, Any] = {}
    try:
        open_ = list(connections)
        while open_ and time.monotonic() < until:
            for connection in wait(open_, timeout=0.1):
                rank = connections.index(connection)
                try:
                    kind, value = connection.recv()
                except EOFError:
                    open_.remove(connection)
                    continue
                if kind == "gather":
                    gathered[rank] = value
                else:
                    print(json.dumps(value), flush=True)
            if len(gathered) == RANKS:
                for connection in connections:
                    connection.send([gathered[rank] for rank in range(RANKS)])
                gathered.clear()
    finally:
        for process in processes:
            with suppress(ProcessLookupError):  # also kills a child that hung
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def main() -> None:
    torch.set_num_threads(1)
    if len(sys.argv) > 1:
        be_a_rank(int(sys.argv[1]), Connection(int(sys.argv[2])))
    else:
        run_ranks()


if __name__ == "__main__":
    main()
