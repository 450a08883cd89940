"""Dispatch and combine as torch ops: with gradients, and inside what `torch.compile` compiles.

    name = deep_ep_py.ops.register(buffer)      # hold on to the Buffer
    received = deep_ep_py.ops.dispatch(x, topk_idx, topk_weights, num_experts, name)
    out = deep_ep_py.ops.combine(my_experts(received), received.routes, name)

Each is collective, and so is its backward: a dispatch's is a combine, a combine's is a dispatch along the same routes.
All ranks of the group must call the same ops in the same order, and have the same inputs require a gradient. A rank
that received no rows is no exception: its experts' output must still depend on `received.x`.

For decoding there are `low_latency_dispatch` and `low_latency_combine`, without gradients.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from deep_ep_py.ops import library
from deep_ep_py.ops.low_latency import Received, low_latency_combine, low_latency_dispatch
from deep_ep_py.ops.registry import register

__all__ = [
    "Dispatched",
    "Received",
    "combine",
    "dispatch",
    "dispatch_again",
    "low_latency_combine",
    "low_latency_dispatch",
    "register",
]


class Dispatched(NamedTuple):
    """What a rank received.

    Attributes
    ----------
    x : torch.Tensor
        bfloat16 [rows, hidden], sorted by source rank, then token. Differentiable.
    topk_idx : torch.Tensor
        Of the dtype of the `topk_idx` that was sent, [rows, top-k]: local expert ids, -1 for experts of other ranks.
    topk_weights : torch.Tensor
        float32 [rows, top-k]: 0 where the id is -1. Differentiable.
    routes : list of torch.Tensor
        For `combine` and `dispatch_again`; of no other use. What they hold is given back with them.
    """

    x: Tensor
    topk_idx: Tensor
    topk_weights: Tensor
    routes: list[Tensor]


def dispatch(
    x: Tensor, topk_idx: Tensor, topk_weights: Tensor, num_experts: int, group: str, num_worst_tokens: int = 0
) -> Dispatched:
    """Send every token to the ranks that hold its experts.

    Gradients: that of `x`, bfloat16, is summed in fp32 over the ranks a token went to; that of `topk_weights` is 0
    where `topk_idx` is -1.

    Parameters
    ----------
    x : torch.Tensor
        bfloat16 [tokens, hidden], hidden a multiple of 8; on the Buffer's device, as the others.
    topk_idx : torch.Tensor
        int64 or int32 [tokens, top-k]: expert ids, -1 for none.
    topk_weights : torch.Tensor
        float32 [tokens, top-k].
    num_experts : int
        Experts of all ranks; rank r holds ids [r * num_experts / ranks, (r + 1) * num_experts / ranks).
    group : str
        From `register`.
    num_worst_tokens : int
        0: as many rows as arrive; a compiler gets an unbacked size. Else the rows of the outputs, the same on all ranks
        and enough for each; those that no rank sent are 0, with index -1.

    Returns
    -------
    Dispatched

    Raises
    ------
    TypeError, ValueError, DeepEPError, DeepEPTimeout
        As `Buffer.dispatch`; and if `group` is not registered.
    """
    return Dispatched(*library.dispatch(x, topk_idx, topk_weights, num_experts, num_worst_tokens, group))


def dispatch_again(x: Tensor, routes: list[Tensor], group: str) -> Tensor:
    """Send other rows along the routes of a dispatch: no counts are exchanged.

    Parameters
    ----------
    x : torch.Tensor
        bfloat16 [tokens, hidden], tokens as in that dispatch; hidden may differ.
    routes : list of torch.Tensor
        `Dispatched.routes` of the same Buffer.
    group : str
        From `register`.

    Returns
    -------
    torch.Tensor
        bfloat16 [rows, hidden], rows as in that dispatch. Differentiable.

    Raises
    ------
    TypeError, ValueError, DeepEPError, DeepEPTimeout
        As `Buffer.dispatch`; and if `routes` are not of this Buffer.
    """
    return library.dispatch_again(x, routes, group)


def combine(x: Tensor, routes: list[Tensor], group: str) -> Tensor:
    """Bring rows back to their tokens' owners and sum them: a plain sum in fp32, rounded once.

    Parameters
    ----------
    x : torch.Tensor
        bfloat16 [rows, hidden], in the order of `Dispatched.x`; the gate's weights are applied.
    routes : list of torch.Tensor
        `Dispatched.routes` of the same Buffer.
    group : str
        From `register`.

    Returns
    -------
    torch.Tensor
        bfloat16 [tokens, hidden]. Differentiable.

    Raises
    ------
    TypeError, ValueError, DeepEPError, DeepEPTimeout
        As `Buffer.combine`; and if `routes` are not of this Buffer.
    """
    return library.combine(x, routes, group)
