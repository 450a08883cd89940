"""Moves the weights of experts from the ranks of one placement to those of another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deep_ep_py.base.kept import kept
from deep_ep_py.buffer import Buffer
from deep_ep_py.eplb.exchange import ExpertRows, agree, experts_held, on_ranks_left, send
from deep_ep_py.eplb.placement import Placement
from deep_ep_py.errors import DeepEPError
from deep_ep_py.v2.barrier import barrier
from deep_ep_py.v2.elastic import ElasticBuffer, buffer_under


class Source(NamedTuple):
    """The place that an expert's weights are copied from."""

    rank: int
    slot: int


def choose_sources(old: list[list[int]], new: list[list[int]], ranks_per_node: int) -> list[dict[int, Source]]:
    """Choose, for every physical expert of a placement, a replica of an earlier one.

    A rank that has held an expert copies its own. Otherwise a replica of the same node is preferred, so that the
    fewest bytes cross the network; among those, the rank that has sent least in this step, then the lowest.

    Parameters
    ----------
    old, new : list of list of int
        The logical experts of each rank, -1 for none.
    ranks_per_node : int
        Number of consecutive ranks that share a node.

    Returns
    -------
    list of dict of int to Source
        For each expert of a rank, by rank: in step i every rank gets its i-th expert, if it has one.

    Raises
    ------
    ValueError
        An expert of `new` has no place in `old`.
    """
    places: dict[int, dict[int, int]] = {}
    for rank, experts in enumerate(old):
        for slot, expert in enumerate(experts):
            places.setdefault(expert, {}).setdefault(rank, slot)
    steps = []
    for slot in range(len(new[0])):
        sent, step = [0] * len(new), {}
        for rank, experts in enumerate(new):
            if experts[slot] < 0:
                continue
            held = places.get(experts[slot])
            if held is None:
                raise ValueError(f"new: expert {experts[slot]} is in no place of the old placement")
            node = rank // ranks_per_node
            source = min(held, key=lambda other: (other != rank, other // ranks_per_node != node, sent[other], other))
            sent[source] += source != rank
            step[rank] = Source(source, held[source])
        steps.append(step)
    return steps


def _held_on_ranks_left(name: str, placement: Placement, layer: int | None, buffer: Buffer) -> list[list[int]]:
    """Return the experts of every rank that the Buffer has not left out; raise unless these ranks hold all."""
    held = on_ranks_left(experts_held(name, placement, layer, buffer.group_size), buffer)
    if missing := sorted(set(range(placement.num_logical_experts)).difference(*held)):
        left_out = f" on a rank other than {lost}, which are left out" if (lost := buffer.masked_ranks) else ""
        raise ValueError(f"{name}: experts {missing} have no replica{left_out}")
    return held


class Move:
    """A move of a layer's experts, one expert of each rank per step, beside a model that still uses the old weights.

    The constructor, `step` and `finish` are operations of the Buffer: all ranks must make them in the same order among
    their other calls. That also makes all ranks use the new weights from the same call on. Nothing may change the
    given tensors until the move is complete; move what an optimizer updates between two of its steps.

    Ranks that the Buffer has left out (`Buffer.recover`) send and get nothing, whatever the placements say of them.

    Parameters
    ----------
    buffer : Buffer or ElasticBuffer
        A Buffer with normal mode.
    tensors : list of torch.Tensor
        [experts of a rank, ...] each, contiguous, of any type, on the Buffer's device: the weights of this rank's
        experts in the old placement, and what else belongs to an expert, such as an optimizer's moments.
    old, new : Placement
        The placement in use and the one to come, of the same experts; equal on all ranks. Each expert has a replica on
        a rank that is left, in both.
    layer : int, optional
        The layer of the placements; required if they have several.

    Raises
    ------
    TypeError, ValueError
        An argument is invalid; or, on all ranks, another rank has passed an invalid one, other placements, or tensors
        of other shapes or types.
    DeepEPError, DeepEPTimeout
        As `Buffer.dispatch`.
    """

    def __init__(
        self,
        buffer: Buffer | ElasticBuffer,
        tensors: Sequence[Tensor],
        old: Placement,
        new: Placement,
        layer: int | None = None,
    ) -> None:
        self._buffer = buffer_under(buffer)
        engine = self._buffer._engine

        def check() -> tuple[tuple[ExpertRows, list[dict[int, Source]]], list[Any]]:
            before, after = (
                _held_on_ranks_left(name, placement, layer, self._buffer)
                for name, placement in [("old", old), ("new", new)]
            )
            given = ExpertRows.of("tensors", tensors, len(before[0]), self._buffer.device)
            steps = choose_sources(before, after, engine.topology.ranks_per_node)
            return (given, steps), [before, after, given.described()]

        self._given, self._steps = agree(self._buffer, check)
        self._generation, self._done = engine.generation, 0
        self._moved = self._empty()

    @kept
    def _empty(self) -> list[Tensor]:
        here = len(self._steps)
        return [given.new_zeros((here, *given.shape[1:])) for given in self._given.tensors]

    @property
    def remaining(self) -> int:
        """Number of steps that are left."""
        return len(self._steps) - self._done

    def step(self) -> int:
        """Move the next expert of each rank.

        Returns
        -------
        int
            The number of steps that are left; 0: complete.

        Raises
        ------
        ValueError
            The move is complete.
        DeepEPError, DeepEPTimeout
            As `Buffer.dispatch`; or the Buffer has recovered since the move began. The old weights are as before; once
            the Buffer has recovered, begin another move.
        """
        if not self.remaining:
            raise ValueError("step: the move is complete, expected no further step")
        self._check_generation()
        sources, slot, rank = self._steps[self._done], self._done, self._buffer.rank
        mine = sources.get(rank)
        if any(source.rank != to for to, source in sources.items()):
            slots = sorted({source.slot for to, source in sources.items() if source.rank == rank != to})
            ranks = range(self._buffer.group_size)
            wanted = [[sources.get(to) == (rank, each) and to != rank for to in ranks] for each in slots]
            in_rank = torch.tensor(wanted, dtype=torch.bool, device="cpu").view(len(slots), len(ranks))
            rows = send(self._buffer, self._given.pack(slots), in_rank.repeat_interleave(self._given.rows, dim=0))
        if mine is not None:
            here = mine.rank == rank
            found = [given[mine.slot] for given in self._given.tensors] if here else self._given.unpack(rows)
            for moved, part in zip(self._moved, found, strict=True):
                moved[slot].copy_(part)
        self._done += 1
        return self.remaining

    def finish(self) -> list[Tensor]:
        """Take all steps that are left, and wait on the host until the weights have arrived on all ranks.

        Returns
        -------
        list of torch.Tensor
            [experts of a rank, ...] each: the tensors of this rank's experts in the new placement; zeros for a place
            that holds none.

        Raises
        ------
        DeepEPError, DeepEPTimeout
            As `step`.
        """
        while self.remaining:
            self.step()
        # On a GPU a step may fail after it has returned. A rank comes to the barrier only if none of its own have
        # failed, so that no rank uses the new weights while another must keep the old ones.
        self._check_generation()
        self._settle()
        barrier(self._buffer._engine)
        self._settle()
        return self._moved

    def _check_generation(self) -> None:
        """Raise if the Buffer has recovered meanwhile: a step may have failed, or need a rank that is left out."""
        engine = self._buffer._engine
        if engine.generation != self._generation:
            raise DeepEPError(
                f"rank {engine.rank}: the Buffer has recovered since this move began: expected another one to be begun"
            )

    def _settle(self) -> None:
        """Wait for all kernels, and raise if one has failed."""
        self._buffer._engine.device.synchronize()
        self._buffer._engine.check_usable()
