"""The ranks of a job that torchrun has started: their machines, and the path between each two."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from deep_ep_py.bootstrap.machines import machine_name
from deep_ep_py.buffer import Buffer
from deep_ep_py.doctor.findings import Section
from deep_ep_py.doctor.measured import Pair, buffer_bytes, measure

_MOST_SHOWN = 64
"""Ranks up to which each has a line of the matrix; beyond, each machine has."""
_LETTERS = {"peer": "P", "ibgda": "I", "proxy": "X", "weak": "W"}
_SELF = "."
_SEVERAL = "*"


@dataclass
class Machine:
    """What is said of one.

    Attributes
    ----------
    name : str
        Its host name.
    ranks : list of int
        That are on it, in order.
    sections : list of Section
        As its first rank has found them.
    """

    name: str
    ranks: list[int] = field(default_factory=list)
    sections: list[Section] = field(default_factory=list)


@dataclass
class Job:
    """What is said of all.

    Attributes
    ----------
    machines : list of Machine
        In the order of their first ranks.
    routes : list of list of str
        By rank, and by rank: "peer" where it is reached by loads and stores, else the fabric. Empty where no Buffer
        could be made.
    pairs : list of Pair
        What was measured of each two ranks; empty where that was not asked for.
    failure : str
        What a rank has failed of; else empty.
    """

    machines: list[Machine]
    routes: list[list[str]]
    pairs: list[Pair]
    failure: str

    def as_json(self) -> dict[str, Any]:
        """Return it as the report's file has it."""
        machines = [
            {"name": one.name, "ranks": one.ranks, "sections": [section.as_json() for section in one.sections]}
            for one in self.machines
        ]
        pairs = [pair.as_json() for pair in self.pairs]
        return {"machines": machines, "routes": self.routes, "pairs": pairs, "failure": self.failure}


@dataclass
class _Tried:
    """What became of a rank's Buffer."""

    routes: list[str] = field(default_factory=list)
    pairs: list[Pair] = field(default_factory=list)
    failure: str = ""


def is_one_of_several() -> bool:
    """Tell whether torchrun, or what sets the same variables, has started this process beside others."""
    size = os.environ.get("WORLD_SIZE", "1")
    return {"RANK", "MASTER_ADDR"} <= os.environ.keys() and size.isdecimal() and int(size) > 1


def examine_job(sections: list[Section], measured: bool) -> Job | None:
    """Make a Buffer of all ranks, and collect what each has found and which path it would take to each other.

    Parameters
    ----------
    sections
        What this rank has found of its machine.
    measured
        Whether each path is timed.

    Returns
    -------
    Job or None
        On rank 0; None on the others.
    """
    dist.init_process_group("gloo")
    try:
        tried, buffer = _Tried(), None
        try:
            buffer = _try(tried, measured)
        except Exception as error:  # of whatever kind: it is what the user would see
            tried.failure = f"{type(error).__name__}: {error}"
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, (machine_name(), socket.gethostname(), sections, tried))
        if buffer is not None:
            buffer.destroy()  # not before: the others may still meet
    finally:
        dist.destroy_process_group()
    if int(os.environ["RANK"]) != 0:
        return None
    machines: dict[str, Machine] = {}
    for rank, (key, name, theirs, _) in enumerate(found):
        machine = machines.setdefault(key, Machine(name, sections=theirs))
        machine.ranks.append(rank)
    of_all: list[_Tried] = [theirs for *_, theirs in found]
    failures = [f"rank {rank}: {one.failure}" for rank, one in enumerate(of_all) if one.failure]
    return Job(
        machines=[*machines.values()],
        routes=[] if failures else [one.routes for one in of_all],
        pairs=[pair for one in of_all for pair in one.pairs],
        failure="\n".join(failures),
    )


def _try(tried: _Tried, measured: bool) -> Buffer:
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    buffer = Buffer(dist.group.WORLD, num_nvl_bytes=buffer_bytes(dist.get_world_size()), device=device)
    tried.routes = [*buffer._engine.topology.routes]
    if measured:
        tried.pairs = measure(buffer, tried.routes, device)
    return buffer


def matrix(job: Job) -> list[str]:
    """Return the lines of a matrix: from each rank to each, or from each machine to each where there are many ranks."""
    ranks = len(job.routes)
    if ranks <= _MOST_SHOWN:
        cells = [
            "".join(_SELF if one == other else _LETTERS.get(path, _SEVERAL) for other, path in enumerate(row))
            for one, row in enumerate(job.routes)
        ]
        labels = [str(rank) for rank in range(ranks)]
    else:
        cells = ["".join(_between(job, one, other) for other in job.machines) for one in job.machines]
        labels = [machine.name for machine in job.machines]
    width = max(map(len, labels), default=0)
    return [f"{label:>{width}}  {line}" for label, line in zip(labels, cells)]


def legend(job: Job) -> str:
    """Return what the letters of the matrix mean, of those that are in it."""
    there = {path for row in job.routes for path in row}
    meanings = {
        "peer": "P: loads and stores",
        "ibgda": "I: ibgda, kernels post on NICs",
        "proxy": "X: proxy, a thread of the host posts",
        "weak": "W: weak, for tests",
    }
    return "; ".join(text for path, text in meanings.items() if path in there)


def _between(job: Job, one: Machine, other: Machine) -> str:
    paths = {job.routes[rank][peer] for rank in one.ranks for peer in other.ranks if rank != peer}
    if not paths:
        return _SELF
    return _LETTERS.get(paths.pop(), _SEVERAL) if len(paths) == 1 else _SEVERAL
