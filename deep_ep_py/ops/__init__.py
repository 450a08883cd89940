"""Dispatch and combine as torch ops, with gradients and support for `torch.compile`::

    name = deep_ep_py.ops.register(buffer)      # keep a reference to the Buffer
    received = deep_ep_py.ops.dispatch(x, topk_idx, topk_weights, num_experts, name)
    out = deep_ep_py.ops.combine(my_experts(received), received.routes, name)

Each op is collective, and so is its backward: the backward of a dispatch is a combine, that of a combine a dispatch
along the same routes. All ranks of the group must call the same ops in the same order, which compiled code keeps, and
the same inputs must require a gradient on all of them. This includes a rank that received no rows: the output of its
experts must still depend on `received.x`.

`dispatch_expanded` and `combine_expanded` are the same for rows grouped by expert, as grouped GEMMs read them.

With `fp8=True`, rows travel as FP8 and are BF16 again on arrival, for training. `dispatch_fp8` and
`dispatch_expanded_fp8` send FP8 rows of the caller and return them as such, for FP8 GEMMs. They have no gradients.

For decoding, use `low_latency_dispatch` and `low_latency_combine`, which have no gradients.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from deep_ep_py.ops import library
from deep_ep_py.ops.expanded import (
    ExpandedRows,
    ScaledExpandedRows,
    combine_expanded,
    dispatch_expanded,
    dispatch_expanded_fp8,
)
from deep_ep_py.ops.low_latency import Received, low_latency_combine, low_latency_dispatch
from deep_ep_py.ops.registry import register
from deep_ep_py.ops.row_types import check_routes, check_types

__all__ = [
    "Dispatched",
    "ExpandedRows",
    "Received",
    "ScaledDispatched",
    "ScaledExpandedRows",
    "combine",
    "combine_expanded",
    "dispatch",
    "dispatch_again",
    "dispatch_expanded",
    "dispatch_expanded_fp8",
    "dispatch_fp8",
    "low_latency_combine",
    "low_latency_dispatch",
    "register",
]


class Dispatched(NamedTuple):
    """The rows and routing that a rank received.

    Attributes
    ----------
    x : torch.Tensor
        bfloat16 [rows, hidden], sorted by source rank, then token. Differentiable.
    topk_idx : torch.Tensor
        [rows, top-k], of the dtype of the `topk_idx` that was sent: local expert ids, -1 for experts of other ranks.
    topk_weights : torch.Tensor
        float32 [rows, top-k], 0 where the id is -1. Differentiable.
    routes : list of torch.Tensor
        Opaque; for `combine` and `dispatch_again`. Their memory is released with them.
    """

    x: Tensor
    topk_idx: Tensor
    topk_weights: Tensor
    routes: list[Tensor]


class ScaledDispatched(NamedTuple):
    """The FP8 rows and the routing that a rank received.

    Attributes
    ----------
    x : torch.Tensor
        [rows, hidden] of the type of the rows that were sent, sorted by source rank, then token.
    scales : torch.Tensor
        [rows, scales] of the type of the scales that were sent.
    topk_idx, topk_weights, routes
        As in `Dispatched`.
    """

    x: Tensor
    scales: Tensor
    topk_idx: Tensor
    topk_weights: Tensor
    routes: list[Tensor]


def dispatch(
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    num_experts: int,
    group: str,
    num_worst_tokens: int = 0,
    fp8: bool = False,
) -> Dispatched:
    """Send every token to the ranks that hold its experts.

    The gradient of `x`, bfloat16, is summed in fp32 over the ranks that a token went to; that of `topk_weights` is 0
    where `topk_idx` is -1.

    Parameters
    ----------
    x : torch.Tensor
        bfloat16 [tokens, hidden], hidden a multiple of 8; like the other tensors, on the Buffer's device.
    topk_idx : torch.Tensor
        int64 or int32 [tokens, top-k]: expert ids, -1 for none.
    topk_weights : torch.Tensor
        float32 [tokens, top-k].
    num_experts : int
        Number of experts on all ranks; rank r holds ids [r * num_experts / ranks, (r + 1) * num_experts / ranks).
    group : str
        The name that `register` returned.
    num_worst_tokens : int
        0: the outputs have as many rows as arrive, an unbacked size to a compiler. Otherwise the number of rows of the
        outputs, the same on all ranks and sufficient for each; rows that no rank sent are 0, with index -1.
    fp8 : bool
        Whether rows travel as FP8 (e4m3 with a scale for every 128 elements, of which hidden must be a multiple), about
        half as many bytes. On arrival they are cast back. The gradient is the same as without: the casts count as
        identities, and gradients travel in bfloat16.

    Returns
    -------
    Dispatched

    Raises
    ------
    TypeError, ValueError, DeepEPError, DeepEPTimeout
        As `Buffer.dispatch`; also if `group` is not registered.
    """
    check_types(group, fp8, x=x, topk_idx=topk_idx, topk_weights=topk_weights)
    received = library.dispatch(x, None, topk_idx, topk_weights, num_experts, num_worst_tokens, fp8, group)
    recv_x, _, recv_topk_idx, recv_topk_weights, routes = received
    return Dispatched(recv_x, recv_topk_idx, recv_topk_weights, routes)


def dispatch_fp8(
    x: Tensor,
    scales: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    num_experts: int,
    group: str,
    num_worst_tokens: int = 0,
) -> ScaledDispatched:
    """Send FP8 rows with their scales to the ranks that hold their experts. Without gradients.

    Parameters
    ----------
    x : torch.Tensor
        [tokens, hidden] of a type of one byte, for example that of `moe.per_token_cast_to_fp8`.
    scales : torch.Tensor
        float32 or int32 [tokens, scales] or [tokens], with any strides. They travel with the rows as they
        are.
    topk_idx, topk_weights, num_experts, group, num_worst_tokens
        As in `dispatch`.

    Returns
    -------
    ScaledDispatched

    Raises
    ------
    TypeError, ValueError, DeepEPError, DeepEPTimeout
        As `dispatch`.
    """
    check_types(group, x=x, scales=scales, topk_idx=topk_idx, topk_weights=topk_weights)
    return ScaledDispatched(
        *library.dispatch(
            x.detach(), scales.detach(), topk_idx, topk_weights.detach(), num_experts, num_worst_tokens, False, group
        )
    )


def dispatch_again(x: Tensor, routes: list[Tensor], group: str) -> Tensor:
    """Send other rows along the routes of a dispatch, without exchanging counts.

    Parameters
    ----------
    x : torch.Tensor
        bfloat16 [tokens, hidden], with as many tokens as in that dispatch; hidden may differ.
    routes : list of torch.Tensor
        `Dispatched.routes` of the same Buffer.
    group : str
        The name that `register` returned.

    Returns
    -------
    torch.Tensor
        bfloat16 [rows, hidden], with as many rows as in that dispatch. Differentiable.

    Raises
    ------
    TypeError, ValueError, DeepEPError, DeepEPTimeout
        As `Buffer.dispatch`; also if `routes` are not of this Buffer.
    """
    check_types(group, x=x)
    check_routes(routes)
    return library.dispatch_again(x, routes, group)


def combine(x: Tensor, routes: list[Tensor], group: str) -> Tensor:
    """Return rows to their tokens' owners and sum them, unweighted, as `Buffer.combine` does.

    Parameters
    ----------
    x : torch.Tensor
        bfloat16 [rows, hidden], in the order of `Dispatched.x`, with the gate's weights already applied.
    routes : list of torch.Tensor
        `Dispatched.routes` of the same Buffer.
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
    return library.combine(x, routes, group)
