"""Handles: the record of a dispatch for its combine and for cached dispatches."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from deep_ep_py.base.carriers import carried, carrying
from deep_ep_py.base.not_copied import NotCopied
from deep_ep_py.modes.normal.plans import Plan
from deep_ep_py.session.origin import number_of

if TYPE_CHECKING:
    from deep_ep_py.session.engine import Engine

_RECORD = "_deep_ep_py_dispatch_record"
"""Attribute of the storage of one element of a handle: its record."""


_OF_A_GROUP = "since it belongs to the Buffers of one group"


class DispatchHandle(NotCopied, tuple[torch.Tensor, ...]):
    """V1's handle, with one channel: a tuple of tensors, which combine and cached dispatches recognize.

    If all ranks are on one node, it has the 6 elements of V1's `intranode_dispatch`: rank_prefix_matrix int32 [ranks,
    ranks], where `[i][j]` is the number of rows that ranks <= i send to rank j; channel_prefix_matrix int32 [ranks, 1],
    the number of rows that this rank sends to each rank; recv_channel_prefix_matrix int32 [ranks, 1], all 0;
    recv_src_idx int32 [rows]; is_token_in_rank bool [tokens, ranks]; send_head int32 [tokens, ranks], a token's index
    among those for that rank, or -1.

    Otherwise it has the 10 elements of `internode_dispatch`: is_token_in_rank; rdma_channel_prefix_matrix int32 [nodes,
    1], the number of tokens that this rank sends to each node; gbl_channel_prefix_matrix int32 [ranks, 1], the same for
    each rank; recv_rdma_channel_prefix_matrix int32 [nodes, 1], the number of tokens that this rank forwards from each
    node, including its own, and recv_rdma_rank_prefix_sum int32 [nodes], where they end; recv_gbl_channel_prefix_matrix
    int32 [ranks, 1], where each source's rows begin, and recv_gbl_rank_prefix_sum int32 [ranks], where they end;
    recv_src_meta uint8 [rows, 8], two int32: the token at the source, and its index among those that the source sends
    to this node; send_rdma_head int32 [tokens, nodes], a token's index among those for that node, or -1; send_nvl_head
    int32 [forwarded tokens, ranks of a node], a forwarded token's index among its source's rows for that rank, or -1.
    In one hop nothing is forwarded: those elements have no rows, or zeros, and the index in recv_src_meta is that of
    the row among those of its source.

    The elements are the library's own tensors and must not be written to; those that are all 0 belong to all handles of
    the Buffer. Whatever has the same elements in the same order is as good as the handle: a plain tuple, a list, what
    autograd has saved, what a framework rebuilds by mapping a function that returns these tensors unchanged. Copies of
    the elements are not. The handle itself cannot be pickled, nor copied with its tensors. Handles compare and hash by
    identity.
    """

    _not_copied = _OF_A_GROUP
    _record: DispatchRecord | None = None
    """Found at once; a handle that a framework has rebuilt has only what its elements bring along."""

    # Tensors do not compare as a tuple's elements must.
    __eq__ = object.__eq__
    __ne__ = object.__ne__
    __hash__ = object.__hash__

    def __copy__(self) -> DispatchHandle:
        return self

    def __repr__(self) -> str:
        record = self._record or find_record(self)
        return f"DispatchHandle({tuple(self)!r})" if record is None else f"DispatchHandle({record.described})"


# Otherwise a handle would be a leaf, whose tensors torch's own functions do not see.
pytree.register_pytree_node(
    DispatchHandle,
    lambda handle: ([*handle], None),
    lambda elements, _: DispatchHandle(elements),
    serialized_type_name="deep_ep_py.DispatchHandle",
)


@dataclass(eq=False, repr=False)
class DispatchRecord(NotCopied):
    """What combine and cached dispatches need of a dispatch, and the tensors that become the elements of its handle.

    A tuple of tensors has no place for it, and frameworks rebuild tuples. So one element of a handle is an alias of
    the record's tensor whose storage refers to the record; the others are the record's own tensors, recognized by their
    addresses, which no other tensor can have as long as the record holds them. The record does not know its handles:
    it is freed with the handle and the last of the alias's tensors.

    Attributes
    ----------
    owner : Engine
        The engine that ran the dispatch. Other Buffers of the same ranks can use the handle too.
    plan : Plan
        The routes.
    is_token_in_rank : torch.Tensor or None
        The ranks that tokens go to: bool [tokens, ranks], as passed to the dispatch; None if there will be no handle.
    recv_source : torch.Tensor
        Where each row comes from: int32 [rows], the token at the source; with several nodes [rows, 2], with the two
        numbers of recv_src_meta.
    topk : int
        Experts per token; 0 if the dispatch carried none.
    operation : int
        The operation's number in its Buffer's generation; the same on all ranks.
    generation : int
        The generation of the Buffer in which the dispatch ran; a recovery begins a new one.
    """

    _not_copied = _OF_A_GROUP

    owner: Engine
    plan: Plan
    is_token_in_rank: torch.Tensor | None
    recv_source: torch.Tensor
    topk: int
    operation: int
    generation: int

    @cached_property
    def tokens(self) -> int:
        """Number of tokens that this rank sent."""
        return self.plan.tensors()[0].shape[0]

    @cached_property
    def rows(self) -> int:
        """Number of rows that this rank received."""
        return self.recv_source.shape[0]

    @property
    def number(self) -> int:
        """The 64 bits by which ranks compare operations: they identify the operation and its Buffer."""
        return number_of(self.owner, self.generation, self.operation)

    @property
    def described(self) -> str:
        """The numbers by which messages name a handle."""
        return (
            f"operation={self.operation}, tokens={self.tokens}, rows={self.rows}, topk={self.topk}, "
            f"rank={self.owner.rank} of {self.owner.ranks}"
        )

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return all tensors that kernels read."""
        return *self.plan.tensors(), self.recv_source

    @property
    def recv_src_idx(self) -> torch.Tensor:
        """Where each row comes from: int32 [rows], the token at the source."""
        return self.recv_source if self.recv_source.dim() == 1 else self.recv_source[:, 0]

    def elements(self) -> tuple[torch.Tensor, ...]:
        """Return the tensors that a handle has, in its order."""
        assert self.is_token_in_rank is not None
        return self.plan.elements(self.is_token_in_rank, self.recv_source, self.owner.zeros)

    def handle(self) -> DispatchHandle:
        """Return the handle for the caller, which keeps the record alive."""
        elements = [*self.elements()]
        elements[self.plan.carrier] = carrying(_RECORD, self, elements[self.plan.carrier])
        handle = DispatchHandle(elements)
        handle._record = self
        return handle


Handle = DispatchHandle | DispatchRecord | tuple[torch.Tensor | None, ...]
"""The type that callers pass: a handle, or its elements; ops pass the record."""


def find_record(given: tuple[Any, ...] | list[Any]) -> DispatchRecord | None:
    """Return the record that one of the elements brings along, if any."""
    records = (carried(_RECORD, element) for element in given)
    return next((record for record in records if record is not None), None)


def record_of(given: Any) -> DispatchRecord:
    """Return the record of the handle that was passed, either itself or as a tuple or list of its elements.

    Raises
    ------
    TypeError, ValueError
        It is neither of these.
    """
    if isinstance(given, DispatchRecord):
        return given
    if isinstance(given, DispatchHandle) and given._record is not None:
        return given._record
    if not isinstance(given, tuple | list) or not any(isinstance(element, torch.Tensor) for element in given):
        kind = type(given).__name__
        raise TypeError(f"handle={kind}: expected the handle that dispatch returned, or the tuple of its elements")
    wanted = f"handle=a {type(given).__name__} of {len(given)}: expected the elements of a dispatch's handle"
    record = find_record(given)
    if record is None:
        raise ValueError(f"{wanted}, not copies of them nor other tensors")
    elements = record.elements()
    if len(given) != len(elements):
        raise ValueError(f"{wanted}, of which there are {len(elements)}")
    for place, (element, own) in enumerate(zip(given, elements, strict=True)):
        if not _is_same(element, own):
            raise ValueError(f"{wanted}, element {place} is not that of DispatchHandle({record.described})")
    return record


def _is_same(given: Any, own: torch.Tensor) -> bool:
    """Return whether it is the same memory; no other tensor can be there, since the record still holds it."""
    return (
        isinstance(given, torch.Tensor)
        and given.layout == own.layout
        and given.dtype == own.dtype
        and given.shape == own.shape
        and given.device == own.device
        and given.data_ptr() == own.data_ptr()
    )
