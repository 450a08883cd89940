"""Handles: the record of a low-latency dispatch that its combines need."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from deep_ep_py.base.carriers import carried, carrying
from deep_ep_py.base.native import C
from deep_ep_py.modes.low_latency.sizes import Sizes
from deep_ep_py.session.origin import number_of

if TYPE_CHECKING:
    from deep_ep_py.session.engine import Engine

Handle = tuple[torch.Tensor, torch.Tensor, int, int, int]
"""V1's handle: packed_recv_src_info int32 [local experts, ranks * maximum tokens], the index of each row's token at its
source; packed_recv_layout_range int64 [local experts, ranks], begin << 32 | count of each source's rows; maximum
tokens; hidden; experts.
"""

_ORIGIN = "_deep_ep_py_low_latency_origin"
"""Attribute of the storage behind packed_recv_src_info."""


class Origin(NamedTuple):
    """The origin of a handle: the dispatch that made it.

    V1's handle does not contain the places where results go and where this rank's results arrive. Therefore the storage
    of the handle's first tensor refers to this object, which lives as long as the storage. A tuple that a caller
    rebuilds from the handle's elements is therefore a valid handle too.

    Attributes
    ----------
    owner : Engine
        The engine that ran the dispatch.
    generation, operation : int
        The generation of its Buffer, and the dispatch's number in it; the same on all ranks.
    sizes : Sizes
        Sizes of the dispatch.
    tokens : int
        Number of tokens that this rank sent.
    places : torch.Tensor
        int32 [words of `places_words`]: where results go, and where this rank's results arrive.
    """

    owner: Engine
    generation: int
    operation: int
    sizes: Sizes
    tokens: int
    places: torch.Tensor

    @property
    def number(self) -> int:
        """The number that identifies the operation and its Buffer; the same on all ranks."""
        return number_of(self.owner, self.generation, self.operation)

    @property
    def result_shape(self) -> tuple[int, int, int]:
        """Shape of the experts' results that the combine takes."""
        ranks = self.owner.ranks
        return self.sizes.experts // ranks, ranks * self.sizes.max_tokens, self.sizes.hidden

    @staticmethod
    def places_words(sizes: Sizes, ranks: int, tokens: int) -> int:
        """Return the number of int32 in `places`."""
        if sizes.weighted:
            return C.low_latency.places_words(sizes.native(), ranks=ranks, tokens=tokens)
        # A compiler may pass symbolic values, which C++ does not accept.
        return sizes.experts * sizes.max_tokens + ranks + tokens * sizes.topk

    def handle_of(self, src_info: torch.Tensor, ranges: torch.Tensor) -> Handle:
        """Return the handle with these two tensors, the first as an alias that refers to this object."""
        return carrying(_ORIGIN, self, src_info), ranges, self.sizes.max_tokens, self.sizes.hidden, self.sizes.experts

    @staticmethod
    def behind(src_info: torch.Tensor) -> Origin | None:
        """Return the origin of a handle's first element; None for another tensor, or a copy."""
        origin = carried(_ORIGIN, src_info)
        return origin if isinstance(origin, Origin) else None


def origin_of(given: Any) -> tuple[Handle, Origin]:
    """Return the handle that was passed, and its origin.

    Raises
    ------
    TypeError, ValueError
        It is not a handle, or its elements are copies.
    """
    wanted = "expected the handle that low_latency_dispatch returned, or a tuple of its elements"
    if not isinstance(given, tuple | list) or len(given) != 5:
        raise TypeError(f"handle={type(given).__name__}: {wanted}")
    src_info, ranges, max_tokens, hidden, experts = given
    if not isinstance(src_info, torch.Tensor) or not isinstance(ranges, torch.Tensor):
        raise TypeError(f"handle=a {type(given).__name__} of 5: {wanted}")
    origin = Origin.behind(src_info)
    if origin is None:
        raise ValueError(f"handle: {wanted}; its first element is a copy or another tensor")
    sizes, ranks = origin.sizes, origin.owner.ranks
    local = sizes.experts // ranks
    if (
        src_info.shape != (local, ranks * sizes.max_tokens)
        or src_info.storage_offset() != 0
        or ranges.shape != (local, ranks)
        or ranges.dtype is not torch.int64
        or not ranges.is_contiguous()
        or ranges.device != src_info.device
        or max_tokens != sizes.max_tokens
        or hidden != sizes.hidden
        or experts != sizes.experts
    ):
        raise ValueError(f"handle: {wanted}; its elements are from different dispatches, or are slices")
    return (src_info, ranges, sizes.max_tokens, sizes.hidden, sizes.experts), origin
