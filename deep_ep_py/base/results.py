"""What the calls of a Buffer return: tuples in DeepEP's order, whose elements also have names.

Elements whose type depends on the arguments are `Any`, so that callers need no casts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from deep_ep_py.base.events import EventOverlap


class DispatchLayout(NamedTuple):
    """The result of `Buffer.get_dispatch_layout`, which describes its elements."""

    num_tokens_per_rank: torch.Tensor
    num_tokens_per_rdma_rank: torch.Tensor | None
    num_tokens_per_expert: torch.Tensor
    is_token_in_rank: torch.Tensor
    event: EventOverlap


class Dispatched(NamedTuple):
    """The result of `Buffer.dispatch`, which describes its elements."""

    recv_x: Any  # a tensor, or a pair of rows and scales as `x` was
    recv_topk_idx: Any  # a tensor, or None without ids
    recv_topk_weights: Any
    num_recv_tokens_per_expert_list: Any  # a list of int, or None with a handle
    handle: Any
    event: EventOverlap


class ElasticDispatched(NamedTuple):
    """The result of `ElasticBuffer.dispatch`, which describes its elements."""

    recv_x: Any  # a tensor, or a pair of rows and scales as `x` was
    recv_topk_idx: Any  # a tensor, or None in the expanded layout
    recv_topk_weights: Any
    handle: Any
    event: EventOverlap


class Combined(NamedTuple):
    """The result of `Buffer.combine`, which describes its elements."""

    combined_x: torch.Tensor
    combined_topk_weights: torch.Tensor | None
    event: EventOverlap


class LowLatencyDispatched(NamedTuple):
    """The result of `Buffer.low_latency_dispatch`, which describes its elements."""

    packed_recv_x: Any  # a tensor, or with `use_fp8` a pair of rows and scales
    packed_recv_count: torch.Tensor
    handle: tuple[Any, ...]
    event: EventOverlap
    hook: Callable[[], None] | None


class LowLatencyCombined(NamedTuple):
    """The result of `Buffer.low_latency_combine`, which describes its elements."""

    combined_x: torch.Tensor
    event: EventOverlap
    hook: Callable[[], None] | None
