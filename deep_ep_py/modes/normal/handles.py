"""Handles: the record of a dispatch for its combine and for cached dispatches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from deep_ep_py.core.kept import kept
from deep_ep_py.modes.normal.plans import Plan
from deep_ep_py.session.origin import number_of

if TYPE_CHECKING:
    from deep_ep_py.session.engine import Engine

_MADE_FOR = "_deep_ep_py_made_for"
"""Attribute of a storage: the handle that an element was made for, and the element's index."""


class DispatchHandle(tuple[torch.Tensor | None, ...]):
    """V1's handle, with one channel, which also knows its Buffer and operation.

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
    In one hop nothing is forwarded: those elements have no rows, or zeros.

    The elements are made on each access; this library itself reads only the attributes. A tuple of the elements is as
    good as the handle, see `handle_of`.

    Attributes
    ----------
    owner : Engine
        The engine that ran the dispatch. Other Buffers of the same ranks can use the handle too.
    plan : Plan
        The routes.
    recv_source : torch.Tensor
        Where each row comes from: int32 [rows], the token at the source; in two hops [rows, 2], with the two numbers of
        recv_src_meta.
    tokens, rows : int
        Number of tokens that this rank sent, and of rows that it received.
    topk : int
        Experts per token; 0 if the dispatch carried none.
    operation : int
        The operation's number in its Buffer's generation; the same on all ranks.
    generation : int
        The generation of the Buffer in which the dispatch ran; a recovery begins a new one.
    """

    owner: Engine
    plan: Plan
    recv_source: torch.Tensor
    tokens: int
    rows: int
    topk: int
    operation: int
    generation: int
    _in_rank: torch.Tensor | None

    def __new__(
        cls,
        owner: Engine,
        plan: Plan,
        is_token_in_rank: torch.Tensor | None,
        recv_source: torch.Tensor,
        topk: int,
        operation: int,
        generation: int,
    ) -> DispatchHandle:
        """Make the handle of an operation whose kernels are launched; the plan can derive `is_token_in_rank`."""
        # The tuple itself provides only the length: `isinstance(handle, tuple)` and `len` are correct, and Python uses
        # the methods of a subclass of tuple to index, iterate and unpack it.
        handle = super().__new__(cls, (None,) * plan.elements)
        handle.owner, handle.plan, handle.topk = owner, plan, topk
        handle.operation, handle.generation = operation, generation
        handle._in_rank, handle.recv_source = is_token_in_rank, recv_source
        handle.tokens, handle.rows = plan.tensors()[0].shape[0], recv_source.shape[0]
        return handle

    def __getitem__(self, index: Any) -> Any:
        return self._elements()[index]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self._elements())

    # Handles compare and hash by identity: tensors do not compare as a tuple's elements must.
    __eq__ = object.__eq__
    __ne__ = object.__ne__
    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return (
            f"DispatchHandle(operation={self.operation}, tokens={self.tokens}, rows={self.rows}, topk={self.topk}, "
            f"rank={self.owner.rank} of {self.owner.ranks})"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("a handle cannot be copied or pickled: it belongs to the Buffers of one group")

    @property
    def number(self) -> int:
        """The 64 bits by which ranks compare operations: they identify the operation and its Buffer."""
        return number_of(self.owner, self.generation, self.operation)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return all tensors that kernels read."""
        return *self.plan.tensors(), self.recv_source

    @property
    def is_token_in_rank(self) -> torch.Tensor:
        """The ranks that tokens go to: bool [tokens, ranks]."""
        if self._in_rank is None:
            self._in_rank = kept(self.plan.in_rank)()
        return self._in_rank

    @property
    def recv_src_idx(self) -> torch.Tensor:
        """Where each row comes from: int32 [rows], the token at the source."""
        return self.recv_source if self.recv_source.dim() == 1 else self.recv_source[:, 0]

    def _elements(self) -> tuple[torch.Tensor, ...]:
        made, held = self._made(), self._held()
        for place, element in made.items():
            setattr(element.untyped_storage(), _MADE_FOR, (self, place))
        return tuple(held[place] if place in held else made[place] for place in range(len(self)))

    def _held(self) -> dict[int, torch.Tensor]:
        """Return the elements that the handle holds anyway, by index."""
        return self.plan.held(self.is_token_in_rank, self.recv_source)

    def _made(self) -> dict[int, torch.Tensor]:
        """Make the other elements, by index, each with memory of its own."""
        return self.plan.made(self.is_token_in_rank, self.recv_source)


Handle = DispatchHandle | tuple[torch.Tensor | None, ...]
"""The type that callers pass: a handle, or its elements."""


def handle_of(given: Any) -> DispatchHandle:
    """Return the handle that was passed, either itself or as a tuple of its elements.

    Callers that pass `*handle` to `save_for_backward` get the elements back as different tensors with the same
    storages. The storage of an element that was made for the handle carries a reference to the handle. The reference
    lives exactly as long as the storage and, unlike an address, is not inherited by later users of the memory: a new
    tensor at the same address has another storage without a reference, and so does a copy. Elements that are the
    handle's own tensors are recognized by their addresses, which no other tensor can have as long as the handle holds
    them.

    Parameters
    ----------
    given : DispatchHandle or sequence
        A handle, or all elements of one handle, in order.

    Raises
    ------
    TypeError, ValueError
        It is neither of these.
    """
    if isinstance(given, DispatchHandle):
        return given
    if not isinstance(given, tuple | list) or not any(isinstance(element, torch.Tensor) for element in given):
        kind = type(given).__name__
        raise TypeError(f"handle={kind}: expected the handle that dispatch returned, or the tuple of its elements")
    wanted = f"handle=a {type(given).__name__} of {len(given)}: expected the elements of a dispatch's handle"
    made_for = [_made_for(element) for element in given]
    handle = next((made[0] for made in made_for if made is not None), None)
    if handle is None:
        raise ValueError(f"{wanted}, not copies of them nor other tensors")
    if len(given) != len(handle):
        raise ValueError(f"{wanted}, of which there are {len(handle)}")
    held = handle._held()
    for place, (element, made) in enumerate(zip(given, made_for, strict=True)):
        if place in held:
            fits = _is_same(element, held[place])
        else:
            fits = made is not None and made[0] is handle and made[1] == place
        if not fits:
            raise ValueError(f"{wanted}, element {place} is not that of {handle}")
    return handle


def _made_for(element: Any) -> tuple[DispatchHandle, int] | None:
    if not isinstance(element, torch.Tensor):
        return None
    try:
        return getattr(element.untyped_storage(), _MADE_FOR, None)
    except RuntimeError:  # a tensor without a storage, such as a sparse one
        return None


def _is_same(given: Any, held: torch.Tensor) -> bool:
    """Return whether it is the same memory; no other tensor can be there, since the handle still holds it."""
    return (
        isinstance(given, torch.Tensor)
        and given.dtype == held.dtype
        and given.shape == held.shape
        and given.device == held.device
        and given.data_ptr() == held.data_ptr()
    )
