"""What a dispatch leaves behind for its combine and for cached dispatches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from deep_ep_py.core.native import C
from deep_ep_py.session.origin import number_of

if TYPE_CHECKING:
    from deep_ep_py.session.engine import Engine

_INTRANODE, _INTERNODE = 6, 10
"""Elements of V1's handles."""
_NOT_THERE = {_INTRANODE: (), _INTERNODE: (3, 4, 7, 9)}
"""Places of those that are None, by the number of elements."""
_MADE_FOR = "_deep_ep_py_made_for"
"""Attribute of a storage: the handle that an element was made for, and the element's place."""


@dataclass(frozen=True)
class Plan:
    """Where this rank's rows go and where the others' rows come from.

    Attributes
    ----------
    token_row : torch.Tensor
        int32 [tokens, ranks]: index of a token among this rank's tokens for that rank, or -1.
    row_token : torch.Tensor
        int32 [ranks, tokens]: the inverse.
    rank_prefix : torch.Tensor
        int32 [ranks, ranks]: `[i][j]` rows that ranks <= i send to rank j.
    source_tokens : torch.Tensor
        int32 [ranks]: tokens of each rank.
    rows_to_rank : torch.Tensor
        int32 [ranks, 1]: rows this rank sends to each.
    """

    token_row: torch.Tensor
    row_token: torch.Tensor
    rank_prefix: torch.Tensor
    source_tokens: torch.Tensor
    rows_to_rank: torch.Tensor

    @staticmethod
    def empty(tokens: int, ranks: int, device: torch.device) -> Plan:
        """Make a plan for notify to fill."""

        def tensor(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.int32, device=device)

        return Plan(tensor(tokens, ranks), tensor(ranks, tokens), tensor(ranks, ranks), tensor(ranks), tensor(ranks, 1))

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return all of it."""
        return self.token_row, self.row_token, self.rank_prefix, self.source_tokens, self.rows_to_rank

    def native(self) -> Any:
        """Return the addresses, as kernels take them."""
        tensors = (self.token_row, self.row_token, self.rank_prefix, self.source_tokens)
        return C.normal.Plan(*(tensor.data_ptr() for tensor in tensors))


class DispatchHandle(tuple[torch.Tensor | None, ...]):
    """V1's handle, with one channel, that also knows its Buffer and operation.

    Where all ranks are on one node, the 6 elements of V1's `intranode_dispatch`: rank_prefix_matrix int32
    [ranks, ranks], `[i][j]` rows that ranks <= i send to rank j; channel_prefix_matrix int32 [ranks, 1], rows this rank
    sends to each; recv_channel_prefix_matrix int32 [ranks, 1], all 0; recv_src_idx int32 [rows]; is_token_in_rank bool
    [tokens, ranks]; send_head int32 [tokens, ranks], a token's index among those for that rank, or -1.

    Else the 10 of `internode_dispatch`: is_token_in_rank; rdma_channel_prefix_matrix int32 [nodes, 1];
    gbl_channel_prefix_matrix int32 [ranks, 1]; None; None; recv_gbl_channel_prefix_matrix int32 [ranks, 1], where each
    source's rows begin; recv_gbl_rank_prefix_sum int32 [ranks], where they end; None; send_rdma_head int32
    [tokens, nodes]; None. What is None describes how V1 passes rows on inside a node; here they go straight to each
    rank.

    The elements are made each time they are asked for; this library reads the attributes alone. A tuple of
    the elements serves as the handle does, see `handle_of`.

    Attributes
    ----------
    owner : Engine
        Whose operation it was. The handle also serves other Buffers of the same ranks.
    plan : Plan
        The routes.
    is_token_in_rank, recv_src_idx : torch.Tensor
        As above.
    tokens, rows : int
        Tokens this rank sent, rows it received.
    topk : int
        Experts per token, 0 where the dispatch carried none.
    operation : int
        The operation's number in its Buffer's generation; the same on all ranks.
    generation : int
        In which generation of its Buffer it was: recovering begins another.
    """

    owner: Engine
    plan: Plan
    is_token_in_rank: torch.Tensor
    recv_src_idx: torch.Tensor
    tokens: int
    rows: int
    topk: int
    operation: int
    generation: int

    def __new__(
        cls,
        owner: Engine,
        plan: Plan,
        is_token_in_rank: torch.Tensor,
        recv_src_idx: torch.Tensor,
        topk: int,
        operation: int,
        generation: int,
    ) -> DispatchHandle:
        """Make the handle of an operation whose kernels are launched."""
        # The tuple proper holds only the length: `isinstance(handle, tuple)` and `len` are true, and Python indexes,
        # iterates and unpacks a subclass of tuple by its own methods.
        handle = super().__new__(cls, (None,) * (_INTRANODE if owner.topology.nodes == 1 else _INTERNODE))
        handle.owner, handle.plan, handle.topk = owner, plan, topk
        handle.operation, handle.generation = operation, generation
        handle.is_token_in_rank, handle.recv_src_idx = is_token_in_rank, recv_src_idx
        handle.tokens, handle.rows = is_token_in_rank.shape[0], recv_src_idx.shape[0]
        return handle

    def __getitem__(self, index: Any) -> Any:
        return self._elements()[index]

    def __iter__(self) -> Iterator[torch.Tensor | None]:
        return iter(self._elements())

    # As a key and in comparisons it is itself: tensors do not compare as a tuple's elements must.
    __eq__ = object.__eq__
    __ne__ = object.__ne__
    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return (
            f"DispatchHandle(operation={self.operation}, tokens={self.tokens}, rows={self.rows}, topk={self.topk}, "
            f"rank={self.owner.rank} of {self.owner.ranks})"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("a handle cannot be copied or pickled: it is of the Buffers of one group")

    @property
    def number(self) -> int:
        """Which operation of which Buffer it was, as the 64 bits that ranks compare."""
        return number_of(self.owner, self.generation, self.operation)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return all that kernels read."""
        return *self.plan.tensors(), self.recv_src_idx

    def _elements(self) -> tuple[torch.Tensor | None, ...]:
        made, held = self._made(), self._held()
        for place, element in made.items():
            setattr(element.untyped_storage(), _MADE_FOR, (self, place))
        return tuple(held.get(place, made.get(place)) for place in range(len(self)))

    def _held(self) -> dict[int, torch.Tensor]:
        """Return the elements that the handle has anyway, by place."""
        plan = self.plan
        if len(self) == _INTERNODE:
            return {0: self.is_token_in_rank, 2: plan.rows_to_rank}
        return {
            0: plan.rank_prefix,
            1: plan.rows_to_rank,
            3: self.recv_src_idx,
            4: self.is_token_in_rank,
            5: plan.token_row,
        }

    def _made(self) -> dict[int, torch.Tensor]:
        """Make the others, by place, each with memory of its own."""
        plan, nodes = self.plan, self.owner.topology.nodes
        if len(self) == _INTRANODE:
            return {2: torch.zeros_like(plan.rows_to_rank)}
        in_node = tokens_in_nodes(self.is_token_in_rank, nodes)
        in_node_so_far = in_node.cumsum(0, dtype=torch.int32)
        ends = plan.rank_prefix[:, self.owner.rank].clone(memory_format=torch.contiguous_format)
        starts = torch.cat([ends.new_zeros(1), ends[:-1]])
        return {
            1: in_node.sum(0, dtype=torch.int32).view(nodes, 1),
            5: starts.view(-1, 1),
            6: ends,
            8: torch.where(in_node, in_node_so_far - 1, -1),
        }


Handle = DispatchHandle | tuple[torch.Tensor | None, ...]
"""What callers pass: a handle, or its elements."""


def handle_of(given: Any) -> DispatchHandle:
    """Return the handle that was passed, itself or as a tuple of its elements.

    Callers that hand `*handle` to `save_for_backward` get the elements back as other tensors, of the same storages. A
    storage that was made for an element carries a reference to the handle. That lives exactly as long as the storage
    and, unlike an address, is not passed on with the memory: what lies where an element once was is another storage,
    without a reference, and so is a copy. The elements that are the handle's own tensors are known by their addresses,
    which nothing else can have as long as the handle holds them.

    Parameters
    ----------
    given : DispatchHandle or sequence
        The elements are all of one handle, and in their places.

    Raises
    ------
    TypeError, ValueError
        It is neither.
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
        elif place in _NOT_THERE[len(handle)]:
            fits = element is None
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
    except RuntimeError:  # a tensor without one, as sparse ones are
        return None


def _is_same(given: Any, held: torch.Tensor) -> bool:
    """Whether it is the same memory: the handle still holds it, so nothing else can be there."""
    return (
        isinstance(given, torch.Tensor)
        and given.dtype == held.dtype
        and given.shape == held.shape
        and given.device == held.device
        and given.data_ptr() == held.data_ptr()
    )


def tokens_in_nodes(is_token_in_rank: torch.Tensor, nodes: int) -> torch.Tensor:
    """Return bool [tokens, nodes]: whether a token goes to any rank of a node."""
    tokens, ranks = is_token_in_rank.shape
    return is_token_in_rank.view(tokens, nodes, ranks // nodes).any(dim=2)
