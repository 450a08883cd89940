"""Bytes of whole experts between ranks, as the rows of dispatches."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from deep_ep_py.base import arguments
from deep_ep_py.base.arguments import ROW_ALIGNMENT
from deep_ep_py.buffer import Buffer
from deep_ep_py.eplb.placement import Placement, checked_layer, checked_placement
from deep_ep_py.transport.bootstrap.together import attempt

T = TypeVar("T")

_ROW_BYTES = 1 << 12
"""Shorter than the rows of most models, so that what a Buffer has for those suffices."""
_DIGEST_BYTES = ROW_ALIGNMENT
_INVALID = bytes(_DIGEST_BYTES)


def _aligned(size: int) -> int:
    return -(-size // ROW_ALIGNMENT) * ROW_ALIGNMENT


@dataclass(frozen=True)
class ExpertRows:
    """How the parameters of one expert lie in rows of bytes: one parameter after the other, each aligned.

    Attributes
    ----------
    tensors : list of torch.Tensor
        [experts of a rank, ...] each, of any type: one for each parameter.
    """

    tensors: list[Tensor]

    @staticmethod
    def of(name: str, tensors: Any, experts: int, device: torch.device) -> ExpertRows:
        """Check the tensors that a caller passes."""
        if not isinstance(tensors, Sequence) or not tensors:
            raise TypeError(f"{name}={arguments.describe(tensors)}: expected a list of at least one tensor")
        for index, given in enumerate(tensors):
            of = f"{name}[{index}]"
            if not isinstance(given, Tensor):
                raise TypeError(f"{of}={arguments.describe(given)}: expected a torch.Tensor")
            if given.device != device or given.dim() == 0 or given.shape[0] != experts or not given.is_contiguous():
                raise ValueError(
                    f"{of}={arguments.describe(given)}: expected a contiguous tensor with {experts} experts, "
                    f"those of this rank, as first extent, on {device}{arguments.elsewhere(given, device)}"
                )
        return ExpertRows([given.detach() for given in tensors])

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return max(ROW_ALIGNMENT, min(_ROW_BYTES, self._bytes()))

    @property
    def rows(self) -> int:
        """Number of rows of an expert, at least 1."""
        return max(1, -(-self._bytes() // self.row_bytes))

    def described(self) -> list[Any]:
        """Return what must be the same on all ranks."""
        return [[list(given.shape[1:]), str(given.dtype)] for given in self.tensors]

    def pack(self, slots: list[int]) -> Tensor:
        """Return the bytes of some of this rank's experts: uint8 [experts * rows, bytes]."""
        out = torch.zeros((len(slots), self.rows * self.row_bytes), dtype=torch.uint8, device=self.tensors[0].device)
        at = 0
        for given in self.tensors:
            size = _bytes_of(given)
            for index, slot in enumerate(slots):
                out[index, at : at + size] = given[slot].reshape(-1).view(torch.uint8)
            at += _aligned(size)
        return out.view(-1, self.row_bytes)

    def unpack(self, rows: Tensor) -> list[Tensor]:
        """Return the parameters of one expert, which are views of its bytes."""
        flat, at, found = rows.reshape(-1), 0, []
        for given in self.tensors:
            size = _bytes_of(given)
            found.append(flat[at : at + size].view(given.dtype).view(given.shape[1:]))
            at += _aligned(size)
        return found

    def _bytes(self) -> int:
        return sum(_aligned(_bytes_of(given)) for given in self.tensors)


def _bytes_of(given: Tensor) -> int:
    return given[0].numel() * given.element_size()


def send(buffer: Buffer, rows: Tensor, in_rank: Tensor) -> Tensor:
    """Send rows to any ranks.

    Parameters
    ----------
    buffer : Buffer
        All of its ranks make this call.
    rows : torch.Tensor
        uint8 [rows, bytes].
    in_rank : torch.Tensor
        bool [rows, ranks] on the CPU: which rank gets which row.

    Returns
    -------
    torch.Tensor
        uint8 [received rows, bytes], sorted by source rank, then row. None come from ranks that are left out.
    """
    counts = in_rank.sum(dim=0, dtype=torch.int32).to(buffer.device)
    received = buffer.dispatch(
        rows, num_tokens_per_rank=counts, is_token_in_rank=in_rank.to(buffer.device), num_tokens_per_expert=counts
    )[0]
    assert isinstance(received, Tensor)
    return received


def agree(buffer: Buffer, check: Callable[[], tuple[T, list[Any]]]) -> T:
    """Raise on all ranks unless `check` passes on all of them and finds the same; return its result.

    Parameters
    ----------
    buffer : Buffer
        All of its ranks make this call.
    check : callable
        Returns the result, and what must be the same on all ranks.

    Raises
    ------
    Exception
        What `check` has raised on this rank.
    ValueError
        Another rank passed other arguments; the message names the ranks.
    """
    checked, failed = attempt(check)
    digest = _INVALID
    if checked is not None:
        digest = hashlib.blake2b(repr(checked[1]).encode(), digest_size=_DIGEST_BYTES).digest()
    row = torch.tensor(list(digest), dtype=torch.uint8, device=buffer.device).view(1, -1)
    gathered = send(buffer, row, torch.ones((1, buffer.group_size), dtype=torch.bool, device="cpu")).cpu()
    if failed is not None:
        raise failed
    assert checked is not None
    ranks_left = sorted({*range(buffer.group_size)}.difference(buffer.masked_ranks))
    others = {rank: bytes(row.tolist()) for rank, row in zip(ranks_left, gathered, strict=True)}
    refused = [rank for rank, other in others.items() if other == _INVALID]
    if refused:
        raise ValueError(f"ranks {refused} have refused their arguments: expected valid ones on all ranks")
    differing = [rank for rank, other in others.items() if other != digest]
    if differing:
        raise ValueError(
            f"rank {buffer.rank}: ranks {differing} passed other placements, or tensors of other shapes or types: "
            "expected the same on all ranks"
        )
    return checked[0]


def experts_held(name: str, placement: Placement, layer: int | None, ranks: int) -> list[list[int]]:
    """Return the logical expert of every physical expert of every rank: [ranks][experts of a rank], -1 for none."""
    checked_placement(placement)
    if placement.num_ranks != ranks:
        raise ValueError(f"{name}: a placement for {placement.num_ranks} ranks, expected {ranks} as the Buffer has")
    held: list[list[int]] = placement.physical_to_logical_map[checked_layer(placement, layer)].view(ranks, -1).tolist()
    return held


def on_ranks_left(held: list[list[int]], buffer: Buffer) -> list[list[int]]:
    """Return the experts of every rank, none for those that the Buffer has left out."""
    left_out = buffer.masked_ranks
    return [[-1] * len(experts) if rank in left_out else experts for rank, experts in enumerate(held)]
