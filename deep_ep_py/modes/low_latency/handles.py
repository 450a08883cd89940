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
        The generation of its Buffer, and its number there; the same on all ranks.
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
        device, ranks = self.owner.device.torch_device, self.owner.ranks
        experts, rows, _ = self.result_shape
        words = self.storage_words(experts, rows, ranks, self.tokens, self.sizes.topk)
        storage = torch.empty(words, dtype=torch.int32, device=device)
        return self.handle_over(storage, torch.empty((experts, ranks), dtype=torch.int64, device=device))

    @staticmethod
    def storage_words(experts: int, rows: int, ranks: int, tokens: int, topk: int) -> int:
        """Return how many int32 lie behind a handle's first element, that included."""
        return 2 * experts * rows + ranks + tokens * topk

    def handle_over(self, storage: torch.Tensor, ranges: torch.Tensor) -> Handle:
        """Make the handle whose first element begins a storage of `storage_words`."""
        setattr(storage.untyped_storage(), _ORIGIN, self)
        experts, rows, _ = self.result_shape
        src_info = storage[: experts * rows].view(experts, rows)
        return src_info, ranges, self.sizes.most_tokens, self.sizes.hidden, self.sizes.experts

    @staticmethod
    def behind(src_info: torch.Tensor) -> Origin | None:
        """Return what a handle's first element is of; None for another tensor, or a copy."""
        origin = getattr(src_info.untyped_storage(), _ORIGIN, None)
        return origin if isinstance(origin, Origin) else None

    def storage_of(self, src_info: torch.Tensor) -> torch.Tensor:
        """Return all that lies behind a handle's first element, as one tensor."""
        experts, rows, _ = self.result_shape
        words = self.storage_words(experts, rows, self.owner.ranks, self.tokens, self.sizes.topk)
        return src_info.as_strided((words,), (1,))

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
    origin = Origin.behind(src_info)
    if origin is None:
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
