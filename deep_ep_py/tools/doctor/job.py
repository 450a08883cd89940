"""The ranks of a job started by torchrun: their machines, and the paths between them."""

from __future__ import annotations

import os
import socket
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from deep_ep_py.buffer import Buffer
from deep_ep_py.tools.doctor.findings import Section, count
from deep_ep_py.tools.doctor.measured import Pair, buffer_bytes, measure
from deep_ep_py.transport.bootstrap.machines import machine_name
from deep_ep_py.transport.topology.gpus import Apart

_MAX_REFUSED = 8
"""How many pairs of GPUs that do not use each other's memory have a line of their own."""


@dataclass
class Machine:
    """A machine of the job.

    Attributes
    ----------
    name : str
        The host name.
    ranks : list of int
        The ranks on it, in order.
    sections : list of Section
        The findings of its first rank.
    """

    name: str
    ranks: list[int] = field(default_factory=list)
    sections: list[Section] = field(default_factory=list)


@dataclass
class Job:
    """The report on a job; for a single machine without a job, there are no ranks, routes and pairs.

    Attributes
    ----------
    machines : list of Machine
        The machines, in the order of their first ranks.
    routes : list of list of str
        For each rank, how it reaches each rank: "peer" for loads and stores, otherwise the fabric. Empty if no Buffer
        could be made, or none was requested.
    gpus : list of str
        Lines about which ranks' GPUs use each other's memory, with the source of each answer; empty on CPUs.
    pairs : list of Pair
        The measurement of each pair of ranks; empty if none was requested.
    failure : str
        The failures of ranks; empty if there were none.
    """

    machines: list[Machine]
    routes: list[list[str]]
    pairs: list[Pair]
    failure: str
    gpus: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Return the job for the JSON report."""
        machines = [
            {"name": one.name, "ranks": one.ranks, "sections": [section.as_json() for section in one.sections]}
            for one in self.machines
        ]
        pairs = [pair.as_json() for pair in self.pairs]
        return {
            "machines": machines,
            "routes": self.routes,
            "gpus": self.gpus,
            "pairs": pairs,
            "failure": self.failure,
        }


@dataclass
class _Tried:
    """The outcome of making a Buffer on a rank."""

    routes: list[str] = field(default_factory=list)
    gpus: list[str] = field(default_factory=list)
    pairs: list[Pair] = field(default_factory=list)
    failure: str = ""


def is_one_of_several() -> bool:
    """Return whether torchrun, or a launcher that sets the same variables, started this as one of several processes."""
    size = os.environ.get("WORLD_SIZE", "1")
    return {"RANK", "MASTER_ADDR"} <= os.environ.keys() and size.isdecimal() and int(size) > 1


def examine_job(sections: list[Section], measured: bool) -> Job | None:
    """Make a Buffer of all ranks, and collect the findings of each rank and the paths that it would take.

    Parameters
    ----------
    sections
        This rank's findings on its machine.
    measured
        Whether to time each path.

    Returns
    -------
    Job or None
        The job on rank 0; None on the others.
    """
    dist.init_process_group("gloo")
    try:
        tried, buffer = _Tried(), None
        try:
            buffer = _try(tried, measured)
        except Exception as error:  # any kind, since the user would see it too
            tried.failure = f"{type(error).__name__}: {error}"
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, (machine_name(), socket.gethostname(), sections, tried))
        if buffer is not None:
            buffer.destroy()  # not earlier: the others may still be making theirs
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
        gpus=[] if failures else of_all[0].gpus,
    )


def about_gpus(apart: Apart) -> list[str]:
    """Describe which ranks' GPUs use each other's memory, and which do not, with the source of each answer."""
    told = sorted(Counter(apart.sources.values()).items())
    lines = [
        f"{count(pairs, 'pair')} of ranks on a machine can use each other's GPU memory, according to {who}"
        for who, pairs in told
    ]
    refused = sorted(apart.reasons.items())
    lines += [f"ranks {one} and {other} cannot: {why}" for (one, other), why in refused[:_MAX_REFUSED]]
    if len(refused) > _MAX_REFUSED:
        lines.append(f"nor can {count(len(refused) - _MAX_REFUSED, 'more pair')}")
    return lines


def _by_text(failures: list[str]) -> list[str]:
    """Return the failures of ranks, with ranks that failed alike in one text."""
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
    tried.gpus = about_gpus(buffer._engine.topology.apart)
    if measured:
        tried.pairs = measure(buffer, tried.routes, device)
    return buffer
