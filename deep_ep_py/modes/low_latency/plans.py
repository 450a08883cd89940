"""Plans that calls of the same sizes share: checked, computed and compiled by the first such call."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from deep_ep_py.base import arguments
from deep_ep_py.base.native import C
from deep_ep_py.modes.low_latency.once_per_node import forwards
from deep_ep_py.modes.low_latency.sizes import Sizes

if TYPE_CHECKING:
    from deep_ep_py.session.engine import Engine, Memory

_KEPT = 256
"""More than the number of different sizes in a model; the number of tokens is not part of them."""
_SCALE_COLUMNS = 4
"""Row strides of scale tensors are a multiple of this, as bulk copies require."""
_WORD_EXPONENTS = 4
"""UE8M0 scales per int32."""


def scales_of(use_fp8: Any, round_scale: Any, use_ue8m0: Any) -> C.low_latency.Scales:
    """Return how rows are cast, from the arguments of a dispatch.

    Raises
    ------
    TypeError, ValueError
        The message names the argument.
    """
    fp8 = arguments.flag("use_fp8", use_fp8)
    rounded = arguments.flag("round_scale", round_scale)
    exponents = arguments.flag("use_ue8m0", use_ue8m0)
    if exponents and not rounded:
        raise ValueError("use_ue8m0=True: expected together with round_scale=True, since scales are powers of two")
    if not fp8:
        return C.low_latency.Scales.NONE
    if exponents:
        return C.low_latency.Scales.EXPONENTS
    return C.low_latency.Scales.POWERS if rounded else C.low_latency.Scales.FLOAT


def scales_memory(scales: C.low_latency.Scales, experts: int, rows: int, hidden: int) -> Memory | None:
    """Return the memory for scales, [experts, words, padded rows], with a column per row; None without scales."""
    if scales == C.low_latency.Scales.NONE:
        return None
    groups, stride = hidden // C.low_latency.SCALE_GROUP, -(-rows // _SCALE_COLUMNS) * _SCALE_COLUMNS
    if scales == C.low_latency.Scales.EXPONENTS:
        return (experts, -(-groups // _WORD_EXPONENTS), stride), torch.int32
    return (experts, groups, stride), torch.float32


class DispatchPlan(NamedTuple):
    """A plan for dispatches.

    Attributes
    ----------
    sizes : Sizes
        Sizes that are the same on all ranks.
    native : native.C.low_latency.Sizes
        The same, in the form that kernel launches take.
    local_experts : int
        Number of experts of this rank.
    outputs : tuple of Memory
        Received rows, their counts, the two tensors of a handle and, if rows are cast, their scales.
    """

    sizes: Sizes
    native: C.low_latency.Sizes
    local_experts: int
    outputs: tuple[Memory, ...]


class Plans:
    """The plans of a Buffer's calls. Arguments have been checked individually, so equal ones have equal types.

    Plans depend only on ranks, regions and networks, which do not change during the lifetime of the Buffer.

    Parameters
    ----------
    engine : Engine
        The engine of the Buffer.
    """

    def __init__(self, engine: Engine) -> None:
        # Caching methods would make this object refer to itself, and a Buffer would outlive its last reference.
        self.dispatch = lru_cache(_KEPT)(partial(_plan_dispatch, engine))
        self.combine = lru_cache(_KEPT)(partial(_plan_combine, engine))


def _plan_dispatch(
    engine: Engine,
    max_tokens: int,
    hidden: int,
    topk: int,
    experts: int,
    use_fp8: bool,
    round_scale: bool,
    use_ue8m0: bool,
    id_bytes: int,
    weighted: bool,
    may_forward: bool,
) -> DispatchPlan:
    """Plan dispatches. With `may_forward`, rows may go once to each node, if that pays off or is requested.

    Raises
    ------
    TypeError, ValueError
        The message names the argument. Also raised if the Buffer is too small.
    """
    scales = scales_of(use_fp8, round_scale, use_ue8m0)
    sizes = Sizes.checked(max_tokens, hidden, topk, experts, engine.ranks, weighted=weighted)
    if may_forward and forwards(engine.topology, sizes, use_fp8):
        sizes = replace(sizes, per_node=engine.topology.ranks_per_node)
    sizes.check_room(engine)
    engine.prepare(sizes.row_bytes, topk, "low_latency_dispatch")
    ranks = engine.ranks
    local, rows = experts // ranks, ranks * max_tokens
    row_scales = scales_memory(scales, local, rows, hidden)
    outputs: tuple[Memory, ...] = (
        ((local, rows, hidden), torch.float8_e4m3fn if use_fp8 else torch.bfloat16),
        ((local,), torch.int32),
        ((local, rows), torch.int32),
        ((local, ranks), torch.int64),
    )
    if row_scales is not None:
        outputs = (*outputs, row_scales)
    return DispatchPlan(sizes, sizes.native(scales, id_bytes), local, outputs)


def _plan_combine(engine: Engine, sizes: Sizes, id_bytes: int, logfmt: bool) -> C.low_latency.Sizes:
    """Plan combines. Returns their sizes in the form that kernel launches take.

    Raises
    ------
    ValueError
        The Buffer is too small.
    """
    if not sizes.weighted:
        sizes = replace(sizes, per_node=1)  # each result is sent back separately
    sizes.check_room(engine, logfmt)
    engine.prepare(sizes.row_bytes, sizes.topk, "low_latency_combine")
    return sizes.native(id_bytes=id_bytes, logfmt=logfmt)
