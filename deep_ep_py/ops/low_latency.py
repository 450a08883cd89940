"""Low-latency dispatch and combine as torch ops, for decoding under `torch.compile`. They have no gradients.

    name = deep_ep_py.ops.register(buffer)      # made with low_latency_mode=True; keep a reference to it
    received = low_latency_dispatch(x, topk_idx, max_tokens, num_experts, name)
    out = low_latency_combine(my_experts(received.x, received.counts), topk_idx, topk_weights, received.routes, name)

All sizes are known before the call, so a compiler needs no unbacked sizes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from deep_ep_py.base.arguments import tensor
from deep_ep_py.buffer import Buffer
from deep_ep_py.modes.low_latency.handles import Handle, Origin
from deep_ep_py.modes.low_latency.plans import scales_memory, scales_of
from deep_ep_py.modes.low_latency.sizes import Sizes
from deep_ep_py.ops.order import in_order
from deep_ep_py.ops.registry import buffer_of, serial_of

_NUMBERS = 7
"""Numbers in routes: Buffer, operation, generation, maximum tokens, hidden, top-k and experts."""


class Received(NamedTuple):
    """The rows that a rank received.

    Attributes
    ----------
    x : torch.Tensor
        [local experts, ranks * num_max_dispatch_tokens_per_rank, hidden], bfloat16 or float8_e4m3fn. The rows of an
        expert come first, sorted by source, then token.
    scales : torch.Tensor or None
        With `use_fp8`, the scales as returned by `Buffer.low_latency_dispatch`.
    counts : torch.Tensor
        int32 [local experts]: number of rows of each.
    routes : list of torch.Tensor
        Opaque; for `low_latency_combine`.
    """

    x: Tensor
    scales: Tensor | None
    counts: Tensor
    routes: list[Tensor]


def low_latency_dispatch(
    x: Tensor,
    topk_idx: Tensor,
    num_max_dispatch_tokens_per_rank: int,
    num_experts: int,
    group: str,
    use_fp8: bool = False,
    round_scale: bool = False,
    use_ue8m0: bool = False,
) -> Received:
    """Send every token to its experts.

    Parameters
    ----------
    group : str
        The name that `register` returned.
    x, topk_idx, num_max_dispatch_tokens_per_rank, num_experts, use_fp8, round_scale, use_ue8m0
        As in `Buffer.low_latency_dispatch`.

    Returns
    -------
    Received

    Raises
    ------
    TypeError, ValueError, DeepEPError, DeepEPTimeout
        As `Buffer.low_latency_dispatch`; also if `group` is not registered.
    """
    max_tokens = num_max_dispatch_tokens_per_rank
    recv_x, scales, counts, routes = dispatch_op(
        x, topk_idx, max_tokens, num_experts, use_fp8, round_scale, use_ue8m0, group
    )
    return Received(recv_x, scales if use_fp8 else None, counts, routes)


def low_latency_combine(
    x: Tensor, topk_idx: Tensor, topk_weights: Tensor, routes: list[Tensor], group: str, use_logfmt: bool = False
) -> Tensor:
    """Send the experts' results back to the tokens' owners, and sum them with the tokens' weights.

    Parameters
    ----------
    x, topk_idx, topk_weights, use_logfmt
        As in `Buffer.low_latency_combine`.
    routes : list of torch.Tensor
        `Received.routes` of the same Buffer.
    group : str
        The name that `register` returned.

    Returns
    -------
    torch.Tensor
        bfloat16 [tokens, hidden].

    Raises
    ------
    TypeError, ValueError, DeepEPError, DeepEPTimeout
        As `Buffer.low_latency_combine`; also if `routes` are not of this Buffer.
    """
    (combined,) = combine_op(x, topk_idx, topk_weights, routes, use_logfmt, group)
    return combined


@torch.library.custom_op(
    "deep_ep::low_latency_dispatch",
    mutates_args=(),
    schema="(Tensor x, Tensor topk_idx, int max_tokens, int num_experts, bool use_fp8, bool round_scale, "
    "bool use_ue8m0, str group) -> (Tensor recv_x, Tensor recv_scales, Tensor recv_counts, Tensor[] routes)",
)
def dispatch_op(
    x: Tensor,
    topk_idx: Tensor,
    max_tokens: int,
    num_experts: int,
    use_fp8: bool,
    round_scale: bool,
    use_ue8m0: bool,
    group: str,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Send tokens to their experts."""
    buffer = buffer_of(group)
    packed, counts, handle, _, _ = buffer.low_latency_dispatch(
        x.contiguous(),
        topk_idx.contiguous(),
        max_tokens,
        num_experts,
        use_fp8=use_fp8,
        round_scale=round_scale,
        use_ue8m0=use_ue8m0,
    )
    recv_x, scales = packed if isinstance(packed, tuple) else (packed, x.new_empty(0))
    return recv_x, scales, counts, _to_routes(buffer, handle)


@in_order(dispatch_op)
def _(
    x: Tensor,
    topk_idx: Tensor,
    max_tokens: int,
    num_experts: int,
    use_fp8: bool,
    round_scale: bool,
    use_ue8m0: bool,
    group: str,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    buffer = buffer_of(group)
    ranks = buffer.group_size
    local, rows, (tokens, hidden), topk = num_experts // ranks, ranks * max_tokens, x.shape, topk_idx.shape[1]
    recv_x = x.new_empty((local, rows, hidden), dtype=torch.float8_e4m3fn if use_fp8 else torch.bfloat16)
    scales = scales_memory(scales_of(use_fp8, round_scale, use_ue8m0), local, rows, hidden)
    places = Origin.places_words(Sizes(max_tokens, hidden, topk, num_experts), ranks, tokens)
    routes = [
        torch.empty(_NUMBERS, dtype=torch.int64, device="cpu"),
        x.new_empty((local, rows), dtype=torch.int32),
        x.new_empty((local, ranks), dtype=torch.int64),
        x.new_empty(places, dtype=torch.int32),
    ]
    packed_scales = x.new_empty(0)
    if scales is not None:
        shape, dtype = scales
        packed_scales = x.new_empty(shape, dtype=dtype).transpose(1, 2)[:, :rows]
    return recv_x, packed_scales, x.new_empty(local, dtype=torch.int32), routes


@torch.library.custom_op(
    "deep_ep::low_latency_combine",
    mutates_args=(),
    schema="(Tensor x, Tensor topk_idx, Tensor topk_weights, Tensor[] routes, bool use_logfmt, str group) -> Tensor[]",
)
def combine_op(
    x: Tensor, topk_idx: Tensor, topk_weights: Tensor, routes: list[Tensor], use_logfmt: bool, group: str
) -> list[Tensor]:
    """Send results back to the tokens' owners and sum them."""
    buffer = buffer_of(group)
    handle = _to_handle(buffer, routes, topk_idx.shape[0])
    combined, _, _ = buffer.low_latency_combine(
        x.contiguous(), topk_idx.contiguous(), topk_weights.contiguous(), handle, use_logfmt=use_logfmt
    )
    return [combined]


@in_order(combine_op)
def _(
    x: Tensor, topk_idx: Tensor, topk_weights: Tensor, routes: list[Tensor], use_logfmt: bool, group: str
) -> list[Tensor]:
    return [x.new_empty((topk_idx.shape[0], x.shape[2]))]


def _to_routes(buffer: Buffer, handle: Handle) -> list[Tensor]:
    """Return a handle's routes: numbers on the CPU, the handle's tensors, and the places of its origin."""
    origin = Origin.behind(handle[0])
    assert origin is not None
    sizes = origin.sizes
    numbers = [serial_of(buffer), origin.operation, origin.generation]
    numbers += [sizes.max_tokens, sizes.hidden, sizes.topk, sizes.experts]
    return [torch.tensor(numbers, device="cpu"), handle[0], handle[1], origin.places]


def _to_handle(buffer: Buffer, routes: list[Tensor], tokens: int) -> Handle:
    """Return the handle that the routes were made from.

    Raises
    ------
    TypeError, ValueError
        A dispatch of this Buffer did not return them.
    """
    if len(routes) != 4:
        raise ValueError(f"routes=a list of {len(routes)}: expected the 4 tensors that low_latency_dispatch returned")
    numbers = tensor("routes[0]", routes[0], torch.int64, (_NUMBERS,), torch.device("cpu"))
    serial, operation, generation, *rest = numbers.tolist()
    if serial != serial_of(buffer):
        raise ValueError("routes: expected those of this Buffer, got those of another Buffer")
    sizes, ranks, device = Sizes(*rest), buffer.group_size, buffer.device
    local, words = sizes.experts // ranks, Origin.places_words(sizes, ranks, tokens)
    src_info = tensor("routes[1]", routes[1], torch.int32, (local, ranks * sizes.max_tokens), device)
    ranges = tensor("routes[2]", routes[2], torch.int64, (local, ranks), device)
    places = tensor("routes[3]", routes[3], torch.int32, (words,), device)
    return Origin(buffer._engine, generation, operation, sizes, tokens, places).handle_of(src_info, ranges)
