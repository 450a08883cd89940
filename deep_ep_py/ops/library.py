"""Registration of the ops with torch: schema, kernel, shapes for compilers, backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deep_ep_py.ops.order import in_order
from deep_ep_py.ops.registry import buffer_of
from deep_ep_py.ops.routes import empty_routes, rows_of, to_record, to_routes, tokens_of, zero_padding
from deep_ep_py.ops.row_types import as_rows, like_received, received_rows, rows_to_send

# --- dispatch -------------------------------------------------------------------------------------------------


@torch.library.custom_op(
    "deep_ep::dispatch",
    mutates_args=(),
    schema="(Tensor x, Tensor? scales, Tensor topk_idx, Tensor topk_weights, int num_experts, int num_worst_tokens, "
    "bool fp8, str group) "
    "-> (Tensor recv_x, Tensor recv_scales, Tensor recv_topk_idx, Tensor recv_topk_weights, Tensor[] routes)",
)
def dispatch(
    x: Tensor,
    scales: Tensor | None,
    topk_idx: Tensor,
    topk_weights: Tensor,
    num_experts: int,
    num_worst_tokens: int,
    fp8: bool,
    group: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    """Send tokens to the ranks of their experts."""
    buffer = buffer_of(group)
    rows, topk_idx = rows_to_send(x, scales, fp8, buffer), topk_idx.contiguous()
    per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, num_experts)
    received, recv_topk_idx, recv_topk_weights, _, handle, _ = buffer.dispatch(
        rows,
        topk_idx=topk_idx,
        topk_weights=topk_weights.contiguous(),
        num_tokens_per_rank=per_rank,
        num_tokens_per_rdma_rank=per_node,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
        num_worst_tokens=num_worst_tokens,
    )
    routes = to_routes(buffer, handle, num_worst_tokens > 0)
    zero_padding(buffer, received, routes)
    return *received_rows(received, fp8), recv_topk_idx, recv_topk_weights, routes


@in_order(dispatch)
def _(
    x: Tensor,
    scales: Tensor | None,
    topk_idx: Tensor,
    topk_weights: Tensor,
    num_experts: int,
    num_worst_tokens: int,
    fp8: bool,
    group: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    rows: Any = num_worst_tokens or torch.library.get_ctx().new_dynamic_size()
    return (
        *like_received(x, scales, rows),
        topk_idx.new_empty((rows, topk_idx.shape[1])),
        topk_weights.new_empty((rows, topk_idx.shape[1])),
        empty_routes(buffer_of(group), x, rows),
    )


def _keep_routes(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    ctx.group = inputs[-1]
    _, _, recv_topk_idx, _, routes = output
    ctx.save_for_backward(recv_topk_idx, *routes)


def _dispatch_backward(
    ctx: Any, grad_x: Tensor, _: Tensor, __: None, grad_weights: Tensor, ___: list[None]
) -> tuple[Any, ...]:
    """Sum the gradients of a token's copies, which a combine returns to its owner."""
    recv_topk_idx, *routes = ctx.saved_tensors
    if not ctx.needs_input_grad[3]:
        return combine(grad_x, routes, ctx.group), *[None] * 7
    grad_weights = grad_weights.masked_fill(recv_topk_idx < 0, 0)  # these weights are 0, whatever was sent
    grad_x, grad_weights = combine_with_weights(grad_x, grad_weights, routes, ctx.group)
    return grad_x, None, None, grad_weights, *[None] * 4


# --- dispatch_again -------------------------------------------------------------------------------------------


@torch.library.custom_op(
    "deep_ep::dispatch_again", mutates_args=(), schema="(Tensor x, Tensor[] routes, str group) -> Tensor[]"
)
def _dispatch_again(x: Tensor, routes: list[Tensor], group: str) -> list[Tensor]:
    buffer = buffer_of(group)
    recv_x = buffer.dispatch(as_rows(x), handle=to_record(buffer, routes))[0]
    zero_padding(buffer, recv_x, routes)
    return [recv_x]


@in_order(_dispatch_again)
def _(x: Tensor, routes: list[Tensor], group: str) -> list[Tensor]:
    return [x.new_empty((rows_of(routes), x.shape[1]))]


def dispatch_again(x: Tensor, routes: list[Tensor], group: str) -> Tensor:
    """Send other rows along the routes of a dispatch."""
    (recv_x,) = _dispatch_again(x, routes, group)
    return recv_x


def _keep_given_routes(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.group = inputs[-1]
    ctx.save_for_backward(*inputs[1])


def _dispatch_again_backward(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    routes = list(ctx.saved_tensors)
    return combine(grads[0], routes, ctx.group), [None] * len(routes), None


# --- combine --------------------------------------------------------------------------------------------------


@torch.library.custom_op(
    "deep_ep::combine", mutates_args=(), schema="(Tensor x, Tensor[] routes, str group) -> Tensor[]"
)
def _combine(x: Tensor, routes: list[Tensor], group: str) -> list[Tensor]:
    buffer = buffer_of(group)
    return [buffer.combine(as_rows(x), to_record(buffer, routes))[0]]


@in_order(_combine)
def _(x: Tensor, routes: list[Tensor], group: str) -> list[Tensor]:
    return [x.new_empty((tokens_of(routes), x.shape[1]))]


def combine(x: Tensor, routes: list[Tensor], group: str) -> Tensor:
    """Return rows to their tokens' owners and sum them."""
    (combined,) = _combine(x, routes, group)
    return combined


def _combine_backward(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    """Send the gradient of each sum to every rank that contributed a row, as a dispatch of the token."""
    routes = list(ctx.saved_tensors)
    return dispatch_again(grads[0], routes, ctx.group), [None] * len(routes), None


@torch.library.custom_op(
    "deep_ep::combine_with_weights",
    mutates_args=(),
    schema="(Tensor x, Tensor topk_weights, Tensor[] routes, str group) -> (Tensor, Tensor)",
)
def combine_with_weights(x: Tensor, topk_weights: Tensor, routes: list[Tensor], group: str) -> tuple[Tensor, Tensor]:
    """Combine rows and a value for each of their choices: the backward of a dispatch."""
    buffer = buffer_of(group)
    combined_x, combined_weights, _ = buffer.combine(
        as_rows(x), to_record(buffer, routes), topk_weights=topk_weights.contiguous()
    )
    assert combined_weights is not None
    return combined_x, combined_weights


@in_order(combine_with_weights)
def _(x: Tensor, topk_weights: Tensor, routes: list[Tensor], group: str) -> tuple[Tensor, Tensor]:
    tokens = tokens_of(routes)
    return x.new_empty((tokens, x.shape[1])), topk_weights.new_empty((tokens, topk_weights.shape[1]))


dispatch.register_autograd(_dispatch_backward, setup_context=_keep_routes)
_dispatch_again.register_autograd(_dispatch_again_backward, setup_context=_keep_given_routes)
_combine.register_autograd(_combine_backward, setup_context=_keep_given_routes)
