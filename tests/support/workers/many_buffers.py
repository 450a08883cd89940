"""Runs under torchrun, 4 processes: Buffers of overlapping groups, of an MPI communicator, one after another."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import torch.distributed as dist

import deep_ep_py as deep_ep
from cases import Case
from harness import Trial, round_trip

ROUNDS, WARM = 60, 20
GROWTH = 4 << 20


def trial_of(ranks: int, seed: int = 1) -> Trial:
    return Trial.of(
        Case("many", ranks, tuple(9 + 5 * r for r in range(ranks)), hidden=64, topk=2, experts=2 * ranks), seed
    )


def groups_that_overlap() -> None:
    """A rank's index in its group counts, not the one in the world; Buffers are independent of each other."""
    rank = dist.get_rank()
    members = [[0, 1], [2, 3], [1, 3], [0, 2, 3]]
    groups = [dist.new_group(ranks) for ranks in members]
    buffers = [(deep_ep.Buffer(dist.group.WORLD, num_nvl_bytes=1 << 20), trial_of(4))]
    for ranks, group in zip(members, groups, strict=True):
        if rank in ranks:
            buffers.append((deep_ep.Buffer(group, num_nvl_bytes=1 << 20), trial_of(len(ranks))))
            assert buffers[-1][0].rank == ranks.index(rank)
    for blocks in (1, 2, 3):
        for buffer, trial in buffers:
            round_trip(buffer, buffer.rank, trial, blocks)


class Communicator:
    """The part of an mpi4py communicator that a Buffer uses."""

    def Get_rank(self) -> int:
        return dist.get_rank()

    def Get_size(self) -> int:
        return dist.get_world_size()

    def allgather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(values, value)
        return values


def an_mpi_communicator() -> None:
    buffer = deep_ep.Buffer(None, num_nvl_bytes=1 << 20, comm=Communicator())
    round_trip(buffer, dist.get_rank(), trial_of(4), 2)


def held() -> tuple[int, int, int]:
    """Return bytes of private memory, open files and mappings of this process."""
    status = Path("/proc/self/status").read_text()
    private = next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("RssAnon"))
    return private, len(os.listdir("/proc/self/fd")), len(Path("/proc/self/maps").read_text().splitlines())


def one_after_another() -> None:
    """Make, use, destroy or drop Buffers repeatedly: nothing grows."""
    rank, trial = dist.get_rank(), trial_of(4)
    before = None
    for number in range(ROUNDS):
        buffer = deep_ep.Buffer(dist.group.WORLD, num_nvl_bytes=1 << 20, arena_bytes=1 << 20)
        round_trip(buffer, rank, trial, 2)
        if (number + rank) % 2:  # on some ranks only, different ones each time
            buffer.destroy()
        del buffer
        gc.collect()
        if number == WARM:
            before = held()
    after = held()
    assert before is not None and after[0] < before[0] + GROWTH, (before, after)
    assert after[1] <= before[1] + 2 and after[2] <= before[2] + 8, (before, after)


def main() -> None:
    dist.init_process_group("gloo")
    groups_that_overlap()
    an_mpi_communicator()
    one_after_another()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
