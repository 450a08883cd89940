"""Which ranks' GPUs can use each other's memory as fabric `peer` does: by loads, stores and atomics."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import TYPE_CHECKING

from deep_ep_py.base.gpus import GpuAnswer, name_of_gpu
from deep_ep_py.base.logs import log
from deep_ep_py.errors import CudaError
from deep_ep_py.transport.bootstrap.connections import Connections

if TYPE_CHECKING:
    from deep_ep_py.device.device import Device
    from deep_ep_py.transport.bootstrap.groups import Bootstrap

Pair = tuple[int, int]
"""Two ranks, the lower one first."""


@dataclass(frozen=True)
class Apart:
    """Pairs of ranks that must not use each other's memory by loads and stores; the same on all ranks.

    Attributes
    ----------
    reasons : mapping of (int, int) to str
        The reason for each pair, the lower rank first.
    sources : mapping of (int, int) to str
        For each other pair of ranks with GPUs of one machine, where the answer comes from, as `GpuAnswer.source`.
    without_access : frozenset of (int, int)
        The pairs that are apart for more than the lack of atomics.
    sharers : tuple of int
        By rank: how many ranks, itself included, have its GPU.
    """

    reasons: Mapping[Pair, str] = field(default_factory=dict)
    sources: Mapping[Pair, str] = field(default_factory=dict)
    without_access: frozenset[Pair] = frozenset()
    sharers: tuple[int, ...] = field(default=(), compare=False)

    @staticmethod
    def ask(bootstrap: Bootstrap, device: Device) -> Apart:
        """Ask each rank about the GPUs of its machine, and have ranks map a little of each other's memory. Collective.

        If a process cannot ask about another's GPU, the answer of the other counts. If neither can, or if a map fails
        on one of them, the two are apart.

        Parameters
        ----------
        bootstrap : Bootstrap
            The ranks, as returned by `connect`.
        device : Device
            The device of this rank.

        Returns
        -------
        Apart
        """
        gpus = [str(gpu) for gpu in bootstrap.all_gather(device.gpu)]
        rank, machines = bootstrap.rank, [0] * bootstrap.size
        if isinstance(bootstrap, Connections):
            machines = bootstrap.machines
        places = [(machine, gpu or rank) for rank, (machine, gpu) in enumerate(zip(machines, gpus, strict=True))]
        near = {gpu for gpu, machine in zip(gpus, machines, strict=True) if gpu and machine == machines[rank]}
        answers = [[gpu, *device.answer_about(gpu)] for gpu in sorted(near)]
        told = [{gpu: GpuAnswer(*answer) for gpu, *answer in theirs} for theirs in bootstrap.all_gather(answers)]
        reasons, sources, unknown = dict[Pair, str](), dict[Pair, str](), dict[Pair, str]()
        without_access = set[Pair]()
        for pair in combinations((peer for peer, gpu in enumerate(gpus) if gpu), 2):
            one, other = pair
            if machines[one] != machines[other]:
                continue
            answer = _joined(told[one][gpus[other]], told[other][gpus[one]])
            if answer.refusal:
                reasons[pair] = answer.refusal
            else:
                sources[pair] = answer.source
            if not answer.access:
                without_access.add(pair)
            if not answer.source:
                unknown[pair] = answer.refusal
        if isinstance(bootstrap, Connections) and sources:
            unmapped = _unmapped(bootstrap, device, gpus, sources)
            reasons |= unmapped
            unknown |= unmapped
            without_access |= unmapped.keys()
            sources = {pair: source for pair, source in sources.items() if pair not in unmapped}
        _warn(rank, {pair: why for pair, why in unknown.items() if machines[pair[0]] == machines[rank]})
        return Apart(reasons, sources, frozenset(without_access), tuple(map(places.count, places)))

    def reason(self, one: int, other: int) -> str:
        """Return why two ranks are apart; empty if they are not."""
        return self.reasons.get((min(one, other), max(one, other)), "")

    def inside_a_node(self, ranks_per_node: int) -> Pair | None:
        """Return the first two ranks of one node that are apart, or None if there are none."""
        return min((pair for pair in self.reasons if len({rank // ranks_per_node for rank in pair}) == 1), default=None)


def _joined(*answers: GpuAnswer) -> GpuAnswer:
    """Return the answer to go by: a refusal by anyone who knows, otherwise that of one who knows."""
    known = [answer for answer in answers if answer.source]
    return next((answer for answer in known if answer.refusal), (known or answers)[0])


def _unmapped(
    bootstrap: Connections, device: Device, gpus: Sequence[str], joined: Mapping[Pair, str]
) -> dict[Pair, str]:
    """Map a little of the memory of each rank that this one is joined with. Collective.

    Returns
    -------
    dict of (int, int) to str
        The pairs of which one rank cannot map the memory of the other, and why; the same on all ranks.
    """
    rank, failed, own = bootstrap.rank, dict[int, str](), None
    peers = [peer for pair in joined if rank in pair for peer in pair if peer != rank]
    try:
        own = device.make_heap(1, 1, 0, in_process=False, by_nics=False)
    except CudaError as error:
        failed = dict.fromkeys(peers, f"rank {rank} cannot share memory of its GPU: {error}")
    with open(os.devnull) as nothing:
        # A rank that has no memory to share gives the others something that they cannot map.
        descriptors = bootstrap.exchange_descriptors(nothing.fileno() if own is None else own.descriptor)
    try:
        for peer in peers:
            try:
                if own is not None:
                    device.map_heap(descriptors[peer], own.bytes, own.mapped, by_nics=False)
            except CudaError as error:
                failed[peer] = f"rank {rank} cannot map memory of rank {peer}'s GPU: {error}"
    finally:
        for descriptor in descriptors.values():
            os.close(descriptor)
    told = enumerate(bootstrap.all_gather([own is not None, [*failed.items()]]))
    reasons = dict[Pair, str]()
    for one, (_, theirs) in sorted(told, key=lambda of_rank: of_rank[1][0]):  # causes before their consequences
        for other, why in theirs:
            names = f"{name_of_gpu(gpus[one])} and {name_of_gpu(gpus[other])}"
            reasons.setdefault((min(one, other), max(one, other)), f"{why} ({names})")
    return reasons


def _warn(rank: int, apart: Mapping[Pair, str]) -> None:
    """Warn, on the first rank concerned, that pairs of ranks of a machine take a slower path than they might."""
    first = min(apart, default=None)
    if first is not None and first[0] == rank:
        more = f" ({len(apart) - 1} more pairs do not either)" if len(apart) > 1 else ""
        log.warning("ranks %d and %d do not use each other's GPU memory: %s%s", *first, apart[first], more)
