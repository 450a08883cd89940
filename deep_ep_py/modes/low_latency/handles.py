"""What a low-latency dispatch leaves behind for its combines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from deep_ep_py.core.native import C
from deep_ep_py.modes.low_latency.sizes import Sizes
from deep_ep_py.session.origin import number_of

if TYPE_CHECKING:
    from deep_ep_py.session.engine import Engine

Handle = tuple[torch.Tensor, torch.Tensor, int, int, int]
"""V1's: packed_recv_src_info int32 [local experts, ranks * most tokens], the source's token of each row;
packed_recv_layout_range int64 [local experts, ranks], begin << 32 | count of each source's rows; most tokens; hidden;
experts."""

_ORIGIN = "_deep_ep_py_low_latency_origin"
"""Attribute of the storage behind packed_recv_src_info."""


@dataclass(frozen=True)
class Origin:
    """Of a handle: the dispatch that made it.

    Where results go, and where this rank's come, lies in the storage behind the handle's first tensor. So a tuple that
    a caller rebuilds of a handle's elements is one too. The storage refers to this object, which lives as long.

    Attributes
    ----------
    owner : Engine
        Whose operation it was.
    generation, operation : int
        In which generation of its Buffer, and the how-manieth there.
    sizes : Sizes
        Of the dispatch.
    tokens : int
        That this rank sent.
    """

    owner: Engine
    generation: int
    operation: int
    sizes: Sizes
    tokens: int

    @property
    def number(self) -> int:
        """Which operation of which Buffer it was; the same on all ranks."""
        return number_of(self.owner, self.generation, self.operation)

    @property
    def result_shape(self) -> tuple[int, int, int]:
        """Of what the experts hand to the combine."""
        ranks = self.owner.ranks
        return self.sizes.experts // ranks, ranks * self.sizes.most_tokens, self.sizes.hidden

    def empty_handle(self) -> Handle:
        """Make a handle for the dispatch to fill."""
        device, sizes, ranks = self.owner.device.torch_device, self.sizes, self.owner.ranks
        experts, rows = sizes.experts // ranks, ranks * sizes.most_tokens
        words = 2 * experts * rows + ranks + self.tokens * sizes.topk
        storage = torch.empty(words, dtype=torch.int32, device=device)
        setattr(storage.untyped_storage(), _ORIGIN, self)
        ranges = torch.empty((experts, ranks), dtype=torch.int64, device=device)
        return storage[: experts * rows].view(experts, rows), ranges, sizes.most_tokens, sizes.hidden, sizes.experts

    def native(self, handle: Handle) -> C.low_latency.Origins:
        """Return the addresses of all there is, as kernels take them."""
        src_info, ranges = handle[:2]
        ranks, rows = self.owner.ranks, src_info.numel()
        positions = src_info.data_ptr() + rows * src_info.element_size()
        first_result = positions + rows * src_info.element_size()
        return C.low_latency.Origins(
            tokens=src_info.data_ptr(),
            ranges=ranges.data_ptr(),
            positions=positions,
            first_result=first_result,
            own_slots=first_result + ranks * src_info.element_size(),
        )


def origin_of(given: Any) -> tuple[Handle, Origin]:
    """Return the handle that was passed, and what it is of.

    Raises
    ------
    TypeError, ValueError
        It is none, or one of copies.
    """
    wanted = "expected the handle that low_latency_dispatch returned, or a tuple of its elements"
    if not isinstance(given, tuple | list) or len(given) != 5:
        raise TypeError(f"handle={type(given).__name__}: {wanted}")
    src_info, ranges, *numbers = given
    if not isinstance(src_info, torch.Tensor) or not isinstance(ranges, torch.Tensor):
        raise TypeError(f"handle=a {type(given).__name__} of 5: {wanted}")
    origin = getattr(src_info.untyped_storage(), _ORIGIN, None)
    if not isinstance(origin, Origin):
        raise ValueError(f"handle: {wanted}; its first element is a copy or another tensor")
    sizes, ranks = origin.sizes, origin.owner.ranks
    experts, rows = sizes.experts // ranks, ranks * sizes.most_tokens
    if (
        tuple(src_info.shape) != (experts, rows)
        or src_info.storage_offset() != 0
        or tuple(ranges.shape) != (experts, ranks)
        or ranges.dtype != torch.int64
        or not ranges.is_contiguous()
        or ranges.device != src_info.device
        or [*numbers] != [sizes.most_tokens, sizes.hidden, sizes.experts]
    ):
        raise ValueError(f"handle: {wanted}; elements are not of one dispatch, or were cut")
    return (src_info, ranges, sizes.most_tokens, sizes.hidden, sizes.experts), origin
