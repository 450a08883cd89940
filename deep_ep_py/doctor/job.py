"""The ranks of a job that torchrun has started: their machines, and how each reaches the others."""

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
    """What is said of all; of a machine alone, without ranks, routes and pairs.

    Attributes
    ----------
    machines : list of Machine
        In the order of their first ranks.
    routes : list of list of str
        By rank, and by rank: "peer" where it is reached by loads and stores, else the fabric. Empty where no Buffer
        could be made, or was asked for.
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
    failures = _by_text([one.failure for one in of_all])
    return Job(
        machines=[*machines.values()],
        routes=[] if failures else [one.routes for one in of_all],
        pairs=[pair for one in of_all for pair in one.pairs],
        failure="\n".join(failures),
    )


def _by_text(failures: list[str]) -> list[str]:
    """Return what ranks have failed of, each text once."""
    ranks: dict[str, list[int]] = {}
    for rank, text in enumerate(failures):
        if text:
            ranks.setdefault(text, []).append(rank)
    return [f"{_named(those, len(failures))}: {text}" for text, those in ranks.items()]


def _named(ranks: list[int], of: int) -> str:
    if len(ranks) == of > 1:
        return "all ranks"
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _try(tried: _Tried, measured: bool) -> Buffer:
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    buffer = Buffer(dist.group.WORLD, num_nvl_bytes=buffer_bytes(dist.get_world_size()), device=device)
    tried.routes = [*buffer._engine.topology.routes]
    if measured:
        tried.pairs = measure(buffer, tried.routes, device)
    return buffer
