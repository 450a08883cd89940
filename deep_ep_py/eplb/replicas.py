"""Keeps the replicas of an expert equal while they are trained: each gets the sum of all their gradients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from deep_ep_py.buffer import Buffer
from deep_ep_py.eplb.exchange import ExpertRows, agree, experts_held, on_ranks_left, send
from deep_ep_py.eplb.placement import Placement
from deep_ep_py.v2.elastic import ElasticBuffer, buffer_under


class ReplicaSums:
    """Sums the gradients of replicas.

    Replicas on ranks that the Buffer has left out (`Buffer.recover`) count no longer, even if that came later.

    Parameters
    ----------
    buffer : Buffer or ElasticBuffer
        A Buffer with normal mode.
    placement : Placement
        The placement in use, equal on all ranks.
    layer : int, optional
        The layer of the placement; required if it has several.

    Raises
    ------
    TypeError, ValueError
        An argument is invalid; or, on all ranks, another rank has passed an invalid or another one.
    DeepEPError, DeepEPTimeout
        As `Buffer.dispatch`.
    """

    def __init__(self, buffer: Buffer | ElasticBuffer, placement: Placement, layer: int | None = None) -> None:
        self._buffer = buffer_under(buffer)

        def check() -> tuple[list[list[int]], list[Any]]:
            held = on_ranks_left(experts_held("placement", placement, layer, self._buffer.group_size), self._buffer)
            return held, [held]

        self._held = agree(self._buffer, check)

    @torch.no_grad()
    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """Replace the gradient of each replica by the sum over all replicas of its expert, in place.

        The sum is in fp32 (fp64 for fp64), over the first experts of all ranks, then the second ones, and so on, and
        rounded once: it has the same bits on all ranks, so that replicas remain equal. All ranks make this call.

        Parameters
        ----------
        tensors : list of torch.Tensor
            [experts of a rank, ...] each, contiguous, floating-point, on the Buffer's device; in the same order on all
            ranks, which compare shapes and types.

        Raises
        ------
        TypeError, ValueError
            An argument is invalid; or, on all ranks, another rank has passed an invalid or another one.
        DeepEPError, DeepEPTimeout
            As `Buffer.dispatch`. On a GPU the next call may raise a failure, and the sums are then wrong.
            If this call raises it, the tensors are as before.
        """
        rank = self._buffer.rank
        mine = self._held[rank]
        given = agree(self._buffer, lambda: self._checked(tensors))
        self._held = on_ranks_left(self._held, self._buffer)
        self._several = _held_more_than_once(self._held)
        sums: dict[int, list[Tensor]] = {}
        for slot in range(len(mine)):
            received = self._exchange(given, slot)
            for source, experts in enumerate(self._held):
                expert = experts[slot]
                if source == rank and expert in self._several:
                    _add(sums, expert, [tensor[slot] for tensor in given.tensors])
                elif self._travels(source, slot, rank):
                    _add(sums, expert, given.unpack(next(received)))
        for slot, expert in enumerate(mine):
            for tensor, total in zip(given.tensors, sums.get(expert, ()), strict=expert in sums):
                tensor[slot].copy_(total)

    def _checked(self, tensors: Sequence[Tensor]) -> tuple[ExpertRows, list[Any]]:
        given = ExpertRows.of("tensors", tensors, len(self._held[self._buffer.rank]), self._buffer.device)
        for index, tensor in enumerate(given.tensors):
            if not tensor.is_floating_point():
                raise TypeError(f"tensors[{index}]: {tensor.dtype}, expected a floating-point type")
        return given, given.described()

    def _exchange(self, given: ExpertRows, slot: int) -> Iterator[Tensor]:
        """Send this rank's gradient in a slot to the other ranks that hold the expert; return theirs, by rank."""
        rank, ranks = self._buffer.rank, range(self._buffer.group_size)
        if not any(self._travels(source, slot, to) for source in ranks for to in ranks):
            return iter(())
        in_rank = torch.tensor([[self._travels(rank, slot, to) for to in ranks]], device="cpu")
        rows = send(self._buffer, given.pack([slot]), in_rank.expand(given.rows, -1).contiguous())
        return iter(rows.split(given.rows))

    def _travels(self, source: int, slot: int, to: int) -> bool:
        """Return whether a rank needs another rank's gradient in a slot."""
        expert = self._held[source][slot]
        return source != to and expert in self._several and expert in self._held[to]


def _held_more_than_once(held: list[list[int]]) -> set[int]:
    """Return the experts that have several replicas."""
    replicas = Counter(expert for expert in chain.from_iterable(held) if expert >= 0)
    return {expert for expert, count in replicas.items() if count > 1}


def _add(sums: dict[int, list[Tensor]], expert: int, parts: list[Tensor]) -> None:
    wide = [part.to(torch.promote_types(part.dtype, torch.float32)) for part in parts]
    if expert in sums:
        for total, part in zip(sums[expert], wide, strict=True):
            total += part
    else:
        sums[expert] = [part.clone() for part in wide]
