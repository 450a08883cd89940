"""Dispatch and combine as torch ops, with gradients and support for `torch.compile`.

    name = deep_ep_py.ops.register(buffer)      # keep a reference to the Buffer
    received = deep_ep_py.ops.dispatch(x, topk_idx, topk_weights, num_experts, name)
    out = deep_ep_py.ops.combine(my_experts(received), received.routes, name)

Each op is collective, and so is its backward: the backward of a dispatch is a combine, that of a combine a dispatch
along the same routes. All ranks of the group must call the same ops in the same order, and the same inputs must require
a gradient on all of them. This includes a rank that received no rows: the output of its experts must still depend on
`received.x`.

`dispatch_expanded` and `combine_expanded` are the same for rows grouped by expert, as grouped GEMMs read them.

For decoding, use `low_latency_dispatch` and `low_latency_combine`, which have no gradients.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from deep_ep_py.ops import library
from deep_ep_py.ops.expanded import ExpandedRows, combine_expanded, dispatch_expanded
from deep_ep_py.ops.low_latency import Received, low_latency_combine, low_latency_dispatch
from deep_ep_py.ops.registry import register

__all__ = [
    "Dispatched",
    "ExpandedRows",
    "Received",
    "combine",
    "combine_expanded",
    "dispatch",
    "dispatch_again",
    "dispatch_expanded",
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


def dispatch(
    x: Tensor, topk_idx: Tensor, topk_weights: Tensor, num_experts: int, group: str, num_worst_tokens: int = 0
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

    Returns
    -------
    Dispatched

    Raises
    ------
    TypeError, ValueError, DeepEPError, DeepEPTimeout
        As `Buffer.dispatch`; also if `group` is not registered.
    """
    return Dispatched(*library.dispatch(x, topk_idx, topk_weights, num_experts, num_worst_tokens, group))


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
    return library.dispatch_again(x, routes, group)


def combine(x: Tensor, routes: list[Tensor], group: str) -> Tensor:
    """Return rows to their tokens' owners and sum them, unweighted, in fp32 with one rounding.

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
    return library.combine(x, routes, group)
