"""The routes of a dispatch into the expanded layout as tensors: those of its rows, then what the layout has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from deep_ep_py.base.arguments import tensor
from deep_ep_py.buffer import Buffer
from deep_ep_py.modes.normal.counted import Choices
from deep_ep_py.modes.normal.expanded import Expanded
from deep_ep_py.modes.normal.handles import DispatchRecord
from deep_ep_py.ops.routes import empty_routes, routes_of_rows, to_record, to_routes
from deep_ep_py.v2.handle import EPHandle

_NUMBERS_OF_LAYOUT = 4
"""Elements of the first tensor of a layout, which `to_expanded_routes` lists with the others."""
_OF_LAYOUT = 5


@dataclass(frozen=True)
class ExpandedRoutes:
    """The routes of one dispatch.

    Attributes
    ----------
    record : DispatchRecord
        The routes of its rows.
    layout : Expanded
        Where a token's rows are.
    choices : Choices
        The choices of this rank's tokens.
    padded : bool
        Whether the layout may have rows after those of the last expert.
    """

    record: DispatchRecord
    layout: Expanded
    choices: Choices
    padded: bool


def to_expanded_routes(buffer: Buffer, handle: EPHandle) -> list[torch.Tensor]:
    """Return the routes of a handle.

    Returns
    -------
    list of torch.Tensor
        Those of `to_routes`; then int64 [4] on the CPU: alignment, rows of the layout, experts on all ranks, and
        whether rows may be more than arrived; then the slots, the rows of each expert, the number of rows received,
        and the tokens' choices.
    """
    layout = handle.expanded
    assert layout is not None
    padded = not handle.num_recv_tokens_per_expert_list
    numbers = torch.tensor([layout.alignment, layout.expanded_rows, handle.num_experts, padded], device="cpu")
    rest = [layout.slots, layout.expert_rows, layout.received.clone(), handle.topk_idx]
    return [*to_routes(buffer, handle.dispatched, padded=False), numbers, *rest]


def empty_expanded_routes(
    buffer: Buffer, x: torch.Tensor, topk_idx: torch.Tensor, rows: int | torch.SymInt, experts: int
) -> list[torch.Tensor]:
    """Return tensors like those of `to_expanded_routes`."""
    counts: Any = {"dtype": torch.int32, "device": x.device}
    return [
        *empty_routes(buffer, x, rows),
        torch.empty(_NUMBERS_OF_LAYOUT, dtype=torch.int64, device="cpu"),
        torch.empty((rows, topk_idx.shape[1]), **counts),
        torch.empty(experts // buffer.group_size, **counts),
        torch.empty((), **counts),
        torch.empty_like(topk_idx),
    ]


def from_expanded_routes(buffer: Buffer, routes: list[torch.Tensor]) -> ExpandedRoutes:
    """Return what the routes were made from.

    Raises
    ------
    TypeError, ValueError
        `dispatch_expanded` of this Buffer did not return them.
    """
    count = routes_of_rows(buffer) + _OF_LAYOUT
    if len(routes) != count:
        raise ValueError(
            f"routes=a list of {len(routes)}: expected the {count} tensors that dispatch_expanded returned"
        )
    rows, (numbers, slots, expert_rows, received, topk_idx) = routes[:-_OF_LAYOUT], routes[-_OF_LAYOUT:]
    record = to_record(buffer, rows)
    names = [f"routes[{index}]" for index in range(len(rows), len(routes))]
    tensor(names[0], numbers, torch.int64, (_NUMBERS_OF_LAYOUT,), torch.device("cpu"))
    alignment, size, experts, padded = numbers.tolist()
    tensor(names[1], slots, torch.int32, (record.rows, record.topk), buffer.device)
    tensor(names[2], expert_rows, torch.int32, (experts // buffer.group_size,), buffer.device)
    tensor(names[3], received, torch.int32, (), buffer.device)
    tensor(names[4], topk_idx, torch.int64, (record.tokens, record.topk), buffer.device, torch.int32)
    layout = Expanded(slots, expert_rows, received, alignment, size)
    return ExpandedRoutes(record, layout, Choices(topk_idx, experts), bool(padded))


def tokens_of(routes: list[torch.Tensor]) -> int:
    """Return how many tokens this rank sent, from shapes alone."""
    return routes[-1].shape[0]
