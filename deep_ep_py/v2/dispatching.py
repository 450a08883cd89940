"""The two ways of V2's dispatch: by expert ids, and again by the handle of an earlier one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from deep_ep_py.base import arguments
from deep_ep_py.base.events import Streams
from deep_ep_py.base.results import ElasticDispatched
from deep_ep_py.modes.normal import layout
from deep_ep_py.modes.normal.counted import ReceivedCounts
from deep_ep_py.modes.normal.expanded import Expand, Placement, ScaleColumns
from deep_ep_py.modes.normal.operations import DispatchArguments, PendingDispatch
from deep_ep_py.modes.normal.rows import Rows
from deep_ep_py.v2.handle import EPHandle
from deep_ep_py.v2.one_by_one import dispatch_choices

if TYPE_CHECKING:
    from deep_ep_py.base.config import Config
    from deep_ep_py.session.engine import Engine


@dataclass(frozen=True)
class Routed:
    """The arguments of a dispatch; see `ElasticBuffer.dispatch`."""

    x: Any
    topk_idx: Any = None
    topk_weights: Any = None
    statistics: Any = None
    num_experts: Any = None
    max_tokens: Any = None
    alignment: Any = None
    config: Config | None = None
    streams: Streams = field(default_factory=Streams)
    copies_ids: bool = True
    host_waits: Any = None
    expands: bool = False
    zero_padding: bool = False
    columns: bool = False
    returns_one_by_one: bool = False
    """With `expands`: whether a combine will not sum a token's rows before they travel."""


def dispatch_anew(engine: Engine, given: Routed, default_max_tokens: int) -> ElasticDispatched:
    """Dispatch by expert ids."""
    device, ranks, streams = engine.device, engine.ranks, given.streams
    for name, value in (("topk_idx", given.topk_idx), ("num_experts", given.num_experts)):
        if value is None:
            raise ValueError(f"{name}=None: expected a value, or a handle")
    experts = arguments.experts(given.num_experts, ranks)
    alignment = arguments.integer(
        "expert_alignment", 1 if given.alignment is None else given.alignment, 1, arguments.MAX_ALIGNMENT
    )
    max_tokens = (default_max_tokens or None) if given.max_tokens is None else given.max_tokens
    if max_tokens is None:
        raise ValueError("num_max_tokens_per_rank=None: expected a number here, or one given to the constructor")
    arguments.integer("num_max_tokens_per_rank", max_tokens, 1, arguments.MAX_TOKENS)
    tokens = Rows.of("x", given.x, device.torch_device).x.shape[0]
    if tokens > max_tokens:
        raise ValueError(f"x: {tokens} tokens, expected at most num_max_tokens_per_rank={max_tokens}")
    topk_idx = arguments.topk_idx(given.topk_idx, experts, device.torch_device, tokens)
    topk, here = topk_idx.shape[1], experts // ranks
    if given.topk_weights is not None:
        arguments.tensor("topk_weights", given.topk_weights, torch.float32, (tokens, topk), device.torch_device)
    _check_statistics(given.statistics, here, device.torch_device)
    host_waits = True if given.host_waits is None else arguments.flag("do_cpu_sync", given.host_waits)
    if host_waits and device.capturing():
        raise ValueError("do_cpu_sync=True: expected False during graph capture, since sizes cannot depend on counts")

    if given.expands and given.returns_one_by_one and max_tokens * topk > arguments.MAX_TOKENS:
        raise ValueError(
            f"num_max_tokens_per_rank={max_tokens}: expected at most {arguments.MAX_TOKENS // topk} with {topk} "
            "experts per token and allow_multiple_reduction=False, since each choice returns by itself"
        )

    max_rows = ranks * max_tokens
    max_expanded = max_expanded_rows(max_rows, topk, here, alignment)
    if not host_waits and max_expanded > arguments.MAX_ROWS:  # which also bounds the running sums
        raise ValueError(
            f"num_max_tokens_per_rank={max_tokens}, expert_alignment={alignment}: expected at most "
            f"{arguments.MAX_ROWS} rows of all local experts, rounded up, without a host wait, they may be "
            f"{max_expanded}"
        )

    with layout.counting(engine, topk_idx, experts, streams) as counted:
        with device.allocating(streams.allocate_on_comm):
            kept_ids = topk_idx.clone() if given.copies_ids else topk_idx
            counts = ReceivedCounts.of(engine, experts, alignment, expanded=given.expands, statistics=given.statistics)
        assert counts.expert_rows is not None
        assert counts.rank_sums is not None
        placement: Placement | None = ScaleColumns() if given.columns else None
        if given.expands:
            received = counts.rank_sums[-1]
            placement = Expand(
                counts.expert_rows, received, alignment, topk, max_expanded, given.zero_padding, given.columns
            )
        per_rank, _, per_expert, in_rank = counted
        pending = PendingDispatch.begin(
            engine,
            DispatchArguments(
                given.x,
                num_tokens_per_rank=per_rank,
                is_token_in_rank=in_rank,
                num_tokens_per_expert=per_expert,
                topk_idx=topk_idx,
                topk_weights=given.topk_weights,
                expert_alignment=alignment,
                num_worst_tokens=0 if host_waits else max_rows,
                config=given.config,
                streams=streams,
                counts=counts,
                placement=placement,
                notes_holders=not given.expands,  # otherwise `fold` makes the others' weights 0
                before=(*counted, kept_ids),
            ),
        )
    x, idx, weights, per_expert_list, dispatched, event = pending.finish()
    one_by_one = None
    if given.expands and given.returns_one_by_one:
        one_by_one, event = dispatch_choices(
            engine,
            kept_ids,
            experts,
            alignment,
            max_rows=0 if host_waits else max_rows * min(topk, here),
            max_expanded=max_expanded,
            config=given.config,
            streams=streams,
        )
    handle = EPHandle(
        dispatched,
        counts,
        placement.layout if isinstance(placement, Expand) else None,
        one_by_one,
        topk_idx=kept_ids,
        num_experts=experts,
        num_max_tokens_per_rank=max_tokens,
        num_sms=pending.blocks,
        config=given.config,
        num_expanded_tokens=sum(per_expert_list) if host_waits else max_expanded,
        num_recv_tokens_per_expert_list=per_expert_list,
    )
    return ElasticDispatched(x, idx, weights, handle, event)


def dispatch_again(engine: Engine, handle: EPHandle, given: Routed) -> ElasticDispatched:
    """Dispatch by the handle of an earlier one."""
    if given.topk_idx is not None:
        raise ValueError("topk_idx: expected None with a handle, which has the ids")
    if given.host_waits not in (None, False, 0):
        raise ValueError(f"do_cpu_sync={given.host_waits!r}: expected False with a handle, whose counts are known")
    for name, value, wanted in (
        ("num_experts", given.num_experts, handle.num_experts),
        ("expert_alignment", given.alignment, handle.expert_alignment),
        ("num_max_tokens_per_rank", given.max_tokens, handle.num_max_tokens_per_rank),
    ):
        if value is not None and value != wanted:
            raise ValueError(f"{name}={arguments.describe(value)}: expected {wanted}, as in the handle's dispatch")
    if given.expands and handle.expanded is None:
        raise ValueError("do_expand=True: expected a handle of a dispatch with do_expand=True")
    topk_idx = handle.choices()
    if given.topk_weights is not None:
        arguments.tensor("topk_weights", given.topk_weights, torch.float32, topk_idx.shape, topk_idx.device)
    experts = handle.num_unaligned_recv_tokens_per_expert
    _check_statistics(given.statistics, experts.shape[0], experts.device)
    placement: Placement | None = ScaleColumns() if given.columns else None
    if given.expands and handle.expanded is not None:
        placement = Expand(
            handle.expanded.expert_rows,
            handle.expanded.received,
            handle.expert_alignment,
            topk_idx.shape[1],
            zero_padding=given.zero_padding,
            columns=given.columns,
            layout=handle.expanded,
        )
    # The slots of the expanded layout are known, so ids travel only where something else needs them.
    carries = not given.expands or given.topk_weights is not None
    pending = PendingDispatch.begin(
        engine,
        DispatchArguments(
            given.x,
            handle.dispatched,
            topk_idx=topk_idx if carries else None,
            topk_weights=given.topk_weights,
            config=given.config or handle.config,
            streams=given.streams,
            num_experts=handle.num_experts,
            placement=placement,
        ),
    )
    x, idx, weights, _, _, event = pending.finish()
    return ElasticDispatched(x, idx, weights, handle, event)


def _check_statistics(statistics: Any, experts: int, device: torch.device) -> None:
    if statistics is not None:
        arguments.tensor("cumulative_local_expert_recv_stats", statistics, torch.int32, (experts,), device)


def max_expanded_rows(received: int, topk: int, experts: int, alignment: int) -> int:
    """Return an upper bound on the rows of the expanded layout, by the rows received and the experts of a rank."""
    rows = received * min(topk, experts) + (alignment - 1) * experts
    return -(-rows // alignment) * alignment
