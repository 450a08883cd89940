"""Dispatch into the expanded layout and combine from it, registered with torch; see `deep_ep_py.ops`."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from deep_ep_py.base.arguments import MAX_TOKENS, integer
from deep_ep_py.base.events import Streams
from deep_ep_py.buffer import Buffer
from deep_ep_py.modes.normal.expanded import Expand, Expanded
from deep_ep_py.modes.normal.operations import CombineArguments, DispatchArguments, PendingCombine, PendingDispatch
from deep_ep_py.ops.expanded_routes import (
    ExpandedRoutes,
    empty_expanded_routes,
    from_expanded_routes,
    to_expanded_routes,
    tokens_of,
)
from deep_ep_py.ops.order import in_order
from deep_ep_py.ops.registry import buffer_of
from deep_ep_py.ops.row_types import (
    as_rows,
    check_routes,
    check_types,
    like_received,
    received_rows,
    rows_to_send,
    zero_rows,
)
from deep_ep_py.v2.dispatching import Routed, dispatch_anew, max_expanded_rows


class ExpandedRows(NamedTuple):
    """The rows that a rank received, grouped by expert.

    Attributes
    ----------
    x : torch.Tensor
        bfloat16 [rows, hidden]: a row for each choice of a local expert; rows that no choice has are 0. Differentiable.
    topk_weights : torch.Tensor
        float32 [rows]: the weight of each row's choice, 0 where there is none. Differentiable.
    ends : torch.Tensor
        int32 [local experts]: where each expert's rows end. Each expert's rows begin where the previous one's end,
        rounded up to a multiple of the alignment; expert 0's at 0.
    routes : list of torch.Tensor
        Opaque; for `combine_expanded`. Their memory is released with them.
    """

    x: Tensor
    topk_weights: Tensor
    ends: Tensor
    routes: list[Tensor]


def dispatch_expanded(
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    num_experts: int,
    group: str,
    expert_alignment: int = 1,
    num_max_tokens: int = 0,
    fp8: bool = False,
) -> ExpandedRows:
    """Send every token to the ranks that hold its experts, and group the rows by expert.

    The gradient of `x`, bfloat16, is summed in fp32 over a token's choices, rounded once on each rank and once in all;
    that of `topk_weights` is 0 where `topk_idx` is -1.

    Parameters
    ----------
    x, topk_idx, topk_weights, num_experts, group
        As in `dispatch`.
    expert_alignment : int
        Each local expert's rows begin at a multiple of this.
    num_max_tokens : int
        0: the outputs have as many rows as arrive, an unbacked size to a compiler. Otherwise the most tokens of a rank,
        the same on all ranks: the host waits for nothing, and the outputs have the largest possible size.
    fp8 : bool
        As in `dispatch`.

    Returns
    -------
    ExpandedRows

    Raises
    ------
    TypeError, ValueError, DeepEPError, DeepEPTimeout
        As `ElasticBuffer.dispatch`; also if `group` is not registered.
    """
    check_types(group, fp8, x=x, topk_idx=topk_idx, topk_weights=topk_weights)
    received = _dispatch(x, None, topk_idx, topk_weights, num_experts, expert_alignment, num_max_tokens, fp8, group)
    recv_x, _, recv_topk_weights, ends, routes = received
    return ExpandedRows(recv_x, recv_topk_weights, ends, routes)


class ScaledExpandedRows(NamedTuple):
    """FP8 rows that a rank received, grouped by expert.

    Attributes
    ----------
    x, scales : torch.Tensor
        Like `x` and `scales` of `dispatch_expanded_fp8`, a row for each choice of a local expert; rows that no choice
        has are 0.
    topk_weights, ends, routes
        As in `ExpandedRows`.
    """

    x: Tensor
    scales: Tensor
    topk_weights: Tensor
    ends: Tensor
    routes: list[Tensor]


def dispatch_expanded_fp8(
    x: Tensor,
    scales: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    num_experts: int,
    group: str,
    expert_alignment: int = 1,
    num_max_tokens: int = 0,
) -> ScaledExpandedRows:
    """Send FP8 rows with their scales, and group them by expert. Without gradients.

    Parameters
    ----------
    x, scales
        As in `dispatch_fp8`.
    topk_idx, topk_weights, num_experts, group, expert_alignment, num_max_tokens
        As in `dispatch_expanded`.

    Returns
    -------
    ScaledExpandedRows

    Raises
    ------
    TypeError, ValueError, DeepEPError, DeepEPTimeout
        As `dispatch_expanded`.
    """
    check_types(group, x=x, scales=scales, topk_idx=topk_idx, topk_weights=topk_weights)
    return ScaledExpandedRows(
        *_dispatch(
            x.detach(),
            scales.detach(),
            topk_idx,
            topk_weights.detach(),
            num_experts,
            expert_alignment,
            num_max_tokens,
            False,
            group,
        )
    )


def combine_expanded(x: Tensor, routes: list[Tensor], group: str) -> Tensor:
    """Return expanded rows to their tokens' owners and sum them, unweighted.

    A token's rows are summed on their rank in fp32 and rounded; these sums are summed at the owner in fp32 and rounded.

    Parameters
    ----------
    x : torch.Tensor
        bfloat16 [rows, hidden], in the layout of `ExpandedRows.x`, with the gate's weights already applied.
    routes : list of torch.Tensor
        `ExpandedRows.routes` of the same Buffer.
    group : str
        The name that `register` returned.

    Returns
    -------
    torch.Tensor
        bfloat16 [tokens, hidden]. Differentiable.

    Raises
    ------
    TypeError, ValueError, DeepEPError, DeepEPTimeout
        As `Buffer.combine`; also if `routes` are not of this Buffer.
    """
    check_types(group, x=x)
    check_routes(routes)
    (combined,) = _combine(x, routes, group)
    return combined


# --- dispatch -------------------------------------------------------------------------------------------------


@torch.library.custom_op(
    "deep_ep::dispatch_expanded",
    mutates_args=(),
    schema="(Tensor x, Tensor? scales, Tensor topk_idx, Tensor topk_weights, int num_experts, int expert_alignment, "
    "int num_max_tokens, bool fp8, str group) "
    "-> (Tensor recv_x, Tensor recv_scales, Tensor recv_topk_weights, Tensor ends, Tensor[] routes)",
)
def _dispatch(
    x: Tensor,
    scales: Tensor | None,
    topk_idx: Tensor,
    topk_weights: Tensor,
    num_experts: int,
    expert_alignment: int,
    num_max_tokens: int,
    fp8: bool,
    group: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    buffer = buffer_of(group)
    rows = rows_to_send(x, scales, fp8, buffer)
    host_waits = integer("num_max_tokens", num_max_tokens, 0, MAX_TOKENS) == 0
    if not host_waits and x.shape[0] > num_max_tokens:
        raise ValueError(f"x: {x.shape[0]} tokens, expected at most num_max_tokens={num_max_tokens}")
    buffer.check()
    given = Routed(
        x=rows,
        topk_idx=topk_idx.contiguous(),
        topk_weights=topk_weights.contiguous(),
        num_experts=num_experts,
        max_tokens=num_max_tokens or max(1, x.shape[0]),
        alignment=expert_alignment,
        host_waits=host_waits,
        expands=True,
        zero_padding=True,
    )
    received, _, recv_topk_weights, handle, _ = dispatch_anew(buffer._engine, given, 0)
    assert handle.expanded is not None
    if not host_waits:
        _zero_beyond(received, handle.expanded)
    ends, routes = handle.psum_num_recv_tokens_per_expert, to_expanded_routes(buffer, handle)
    return *received_rows(received, fp8), recv_topk_weights, ends, routes


@in_order(_dispatch)
def _(
    x: Tensor,
    scales: Tensor | None,
    topk_idx: Tensor,
    topk_weights: Tensor,
    num_experts: int,
    expert_alignment: int,
    num_max_tokens: int,
    fp8: bool,
    group: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    buffer, context = buffer_of(group), torch.library.get_ctx()
    local = num_experts // buffer.group_size
    if num_max_tokens:
        received: Any = buffer.group_size * num_max_tokens
        rows: Any = max_expanded_rows(received, topk_idx.shape[1], local, expert_alignment)
    else:
        received, rows = context.new_dynamic_size(), context.new_dynamic_size()
    return (
        *like_received(x, scales, rows),
        topk_weights.new_empty((rows,)),
        torch.empty(local, dtype=torch.int32, device=x.device),
        empty_expanded_routes(buffer, x, topk_idx, received, num_experts),
    )


def _keep_routes(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    ctx.group = inputs[-1]
    ctx.save_for_backward(*output[-1])


def _dispatch_backward(
    ctx: Any, grad_x: Tensor, _: Tensor, grad_weights: Tensor, __: None, ___: list[None]
) -> tuple[Any, ...]:
    """Sum the gradients of a token's rows, which a combine returns to its owner."""
    grad_x, of_weights = _combine_with_weights(grad_x, grad_weights, list(ctx.saved_tensors), ctx.group)
    return grad_x, None, None, of_weights, *[None] * 5


# --- combine --------------------------------------------------------------------------------------------------


def _combined(buffer: Buffer, x: Tensor, weights: Tensor | None, routes: ExpandedRoutes) -> tuple[Any, ...]:
    choices = routes.choices if buffer._engine.topology.hops == 1 else None
    given = CombineArguments(as_rows(x), routes.record, weights, choices=choices, placement=routes.layout)
    buffer.check()
    return PendingCombine.begin(buffer._engine, given).finish()


@torch.library.custom_op(
    "deep_ep::combine_expanded", mutates_args=(), schema="(Tensor x, Tensor[] routes, str group) -> Tensor[]"
)
def _combine(x: Tensor, routes: list[Tensor], group: str) -> list[Tensor]:
    buffer = buffer_of(group)
    return [_combined(buffer, x, None, from_expanded_routes(buffer, routes))[0]]


@in_order(_combine)
def _(x: Tensor, routes: list[Tensor], group: str) -> list[Tensor]:
    return [x.new_empty((tokens_of(routes), x.shape[1]))]


def _keep_given_routes(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.group, ctx.rows = inputs[-1], inputs[0].shape[0]
    ctx.save_for_backward(*inputs[1])


def _combine_backward(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    """Send the gradient of each sum to every row that was summed, as a dispatch of the token."""
    routes = list(ctx.saved_tensors)
    return _dispatch_again(grads[0], routes, ctx.rows, ctx.group)[0], [None] * len(routes), None


@torch.library.custom_op(
    "deep_ep::combine_expanded_with_weights",
    mutates_args=(),
    schema="(Tensor x, Tensor topk_weights, Tensor[] routes, str group) -> (Tensor, Tensor)",
)
def _combine_with_weights(x: Tensor, topk_weights: Tensor, routes: list[Tensor], group: str) -> tuple[Tensor, Tensor]:
    buffer = buffer_of(group)
    combined_x, weights, _ = _combined(buffer, x, topk_weights.contiguous(), from_expanded_routes(buffer, routes))
    return combined_x, weights


@in_order(_combine_with_weights)
def _(x: Tensor, topk_weights: Tensor, routes: list[Tensor], group: str) -> tuple[Tensor, Tensor]:
    tokens = tokens_of(routes)
    return x.new_empty((tokens, x.shape[1])), topk_weights.new_empty((tokens, routes[-1].shape[1]))


# --- the same rows again, for the backward of a combine --------------------------------------------------------


@torch.library.custom_op(
    "deep_ep::dispatch_expanded_again",
    mutates_args=(),
    schema="(Tensor x, Tensor[] routes, SymInt rows, str group) -> Tensor[]",
)
def _dispatch_again(x: Tensor, routes: list[Tensor], rows: int, group: str) -> list[Tensor]:
    buffer = buffer_of(group)
    found = from_expanded_routes(buffer, routes)
    layout = found.layout
    placement = Expand(
        layout.expert_rows, layout.received, layout.alignment, layout.topk, zero_padding=True, layout=layout
    )
    buffer.check()
    given = DispatchArguments(as_rows(x), found.record, streams=Streams(), placement=placement)
    recv_x: Tensor = PendingDispatch.begin(buffer._engine, given).finish()[0]
    if found.padded:
        _zero_beyond(recv_x, layout)
    return [recv_x]


@in_order(_dispatch_again)
def _(x: Tensor, routes: list[Tensor], rows: int, group: str) -> list[Tensor]:
    return [x.new_empty((rows, x.shape[1]))]


def _zero_beyond(received: Tensor | tuple[Tensor, Tensor], layout: Expanded) -> None:
    """Zero the rows after those of the last expert, so that no gradient depends on uninitialized memory."""
    align = layout.alignment
    end = ((layout.expert_rows + align - 1) // align * align).sum()
    zero_rows(received, torch.arange(layout.expanded_rows, device=end.device) >= end)


_dispatch.register_autograd(_dispatch_backward, setup_context=_keep_routes)
_combine.register_autograd(_combine_backward, setup_context=_keep_given_routes)
