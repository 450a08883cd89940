"""A combine of the expanded layout whose rows return one by one, so that only their token's owner sums and rounds.

Otherwise a rank sums a token's rows before they travel, and rounds the sum. Here every choice is a token of its own:
beside each dispatch runs a second one of the same routing, whose rows carry nothing. Its handle is that of a combine
which moves each row from its place in the layout to its choice and has nothing to sum; a kernel of the same operation
then sums the rows of each token's choices.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from deep_ep_py.modes.normal import layout
from deep_ep_py.modes.normal.choice_sums import ChoiceSums
from deep_ep_py.modes.normal.counted import ReceivedCounts
from deep_ep_py.modes.normal.expanded import Expand, Expanded
from deep_ep_py.modes.normal.operations import CombineArguments, DispatchArguments, PendingCombine, PendingDispatch
from deep_ep_py.modes.normal.plans import way_of

if TYPE_CHECKING:
    from deep_ep_py.base.config import Config
    from deep_ep_py.base.events import EventOverlap, Streams
    from deep_ep_py.modes.normal.handles import DispatchRecord
    from deep_ep_py.session.engine import Engine
    from deep_ep_py.v2.handle import EPHandle

_HIDDEN = 8
"""Elements of a row that carries nothing: the fewest."""


@dataclass(frozen=True)
class OneByOne:
    """How the rows of one dispatch's expanded layout return one by one.

    Attributes
    ----------
    dispatched : DispatchRecord
        Of the dispatch in which each choice is a token.
    expanded : Expanded
        Where each choice's row is: the same layout.
    sums : ChoiceSums
        What follows the combine.
    """

    dispatched: DispatchRecord
    expanded: Expanded
    sums: ChoiceSums


def prepare(engine: Engine, row_bytes: int, topk: int) -> None:
    """Prepare the kernels for combining rows of this many bytes."""
    notify, _, dispatch, combine = way_of(engine.topology).kernels
    engine.prepare(0, 1, "layout")
    engine.prepare(2 * _HIDDEN, 1, notify, dispatch, "expand_slots", "expand_rows")
    engine.prepare(row_bytes, 0, combine)
    engine.prepare(row_bytes, 1, combine, "fold")
    engine.prepare(row_bytes, topk, "fold")


def dispatch_choices(
    engine: Engine,
    topk_idx: torch.Tensor,
    experts: int,
    alignment: int,
    *,
    max_rows: int,
    max_expanded: int,
    config: Config | None,
    streams: Streams,
) -> tuple[OneByOne, EventOverlap]:
    """Run the dispatch in which each choice is a token.

    The arguments are those of the dispatch of the tokens, which has checked them, and without a host wait `max_rows`
    and `max_expanded`, the largest possible number of choices that arrive and of rows of the layout; otherwise 0.
    """
    where, (tokens, topk) = engine.device.torch_device, topk_idx.shape
    choices = topk_idx.view(tokens * topk, 1)
    with layout.counting(engine, choices, experts, streams) as counted:
        with engine.device.allocating(streams.allocate_on_comm):
            x = torch.zeros((tokens * topk, _HIDDEN), dtype=torch.bfloat16, device=where)
            sums = ChoiceSums.of(tokens, topk, where)
            counts = ReceivedCounts.of(engine, experts, alignment, expanded=True)
        assert counts.expert_rows is not None
        assert counts.rank_sums is not None
        placement = Expand(counts.expert_rows, counts.rank_sums[-1], alignment, 1, max_expanded)
        per_rank, _, per_expert, in_rank = counted
        given = DispatchArguments(
            x,
            num_tokens_per_rank=per_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=choices,
            expert_alignment=alignment,
            num_worst_tokens=max_rows,
            config=config,
            streams=streams,
            counts=counts,
            placement=placement,
            before=counted,
        )
        pending = PendingDispatch.begin(engine, given)
    *_, dispatched, event = pending.finish()
    assert placement.layout is not None
    return OneByOne(dispatched, placement.layout, sums), event


def combine_one_by_one(engine: Engine, given: CombineArguments, handle: EPHandle) -> tuple[Any, ...]:
    """Combine the rows of the expanded layout one by one: `given` without what depends on that.

    Raises
    ------
    ValueError
        The handle is of a dispatch that did not prepare for it.
    """
    found = handle.one_by_one
    if found is None:
        raise ValueError(
            "handle: expected one of a Buffer with allow_multiple_reduction=False, got one whose rows are summed on "
            "their way"
        )
    given = replace(given, handle=found.dispatched, placement=found.expanded, sums=found.sums)
    x, weights, event = PendingCombine.begin(engine, given).finish()
    return x, None if weights is None else weights.view(found.sums.slots.shape), event
