"""The local parts of normal-mode calls: where tokens go, whether rows fit, and preparing kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from deep_ep_py.base.native import C
from deep_ep_py.modes.normal.plans import way_of
from deep_ep_py.session.setup_ranks import REGION_ALIGNMENT

if TYPE_CHECKING:
    from deep_ep_py.base.events import EventHandle, Streams
    from deep_ep_py.session.engine import Engine


Outputs = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]
"""Tokens per rank, per node (None with one node) and per expert, and the ranks of each token."""


def count_tokens(
    engine: Engine, topk_idx: torch.Tensor, num_experts: int, streams: Streams
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor, EventHandle]:
    """Count the tokens for each rank and expert, for `Buffer.get_dispatch_layout`. This is not an operation."""
    outputs = launch_count(engine, topk_idx, num_experts, streams)
    tensors = (topk_idx, *outputs)
    return *outputs, engine.device.order_caller_after(tensors, streams.async_finish, streams.allocate_on_comm)


def launch_count(engine: Engine, topk_idx: torch.Tensor, num_experts: int, streams: Streams) -> Outputs:
    """Launch the count of the tokens for each rank and expert."""
    (tokens, topk), device, nodes = topk_idx.shape, engine.device, engine.topology.nodes
    engine.prepare(0, topk, "layout")
    with device.allocating(streams.allocate_on_comm):
        per_rank = torch.empty(engine.ranks, dtype=torch.int32, device=device.torch_device)
        per_node = torch.empty(nodes, dtype=torch.int32, device=device.torch_device) if nodes > 1 else None
        per_expert, zero_words = _per_expert(engine, num_experts)
        in_rank = torch.empty((tokens, engine.ranks), dtype=torch.bool, device=device.torch_device)
    device.order_after_caller(streams.event, streams.allocate_on_comm)
    outputs = per_rank, per_node, per_expert, in_rank
    launch_layout(engine, topk_idx, num_experts, outputs, zero_words)
    engine.counted.note(topk_idx, per_expert, in_rank)
    return outputs


def _per_expert(engine: Engine, num_experts: int) -> tuple[torch.Tensor, int]:
    """Return a tensor for the tokens per expert, and the address of words that are zero, for the sums over blocks.

    In a capture they are part of the graph: a replay must use none that the Buffer owns, which the program may drop, or
    that a call beside it uses. Otherwise the address is 0, and the Buffer has such words.
    """
    device = engine.device.torch_device
    if not engine.device.capturing():
        return torch.empty(num_experts, dtype=torch.int32, device=device), 0
    sums = 1 + 2 * engine.ranks + num_experts  # as many nodes as ranks, at most
    both = torch.zeros(num_experts + sums, dtype=torch.int32, device=device)
    return both[:num_experts], both[num_experts:].data_ptr()


@contextmanager
def counting(engine: Engine, topk_idx: torch.Tensor, num_experts: int, streams: Streams) -> Iterator[Outputs]:
    """Launch the count for a dispatch that the body begins, which then holds the tensors."""
    outputs = launch_count(engine, topk_idx, num_experts, streams)
    try:
        yield outputs
    except BaseException:  # the count may still be running: nothing may reuse its memory before
        engine.device.order_caller_after(
            (topk_idx, *outputs), async_finish=False, on_comm_stream=streams.allocate_on_comm
        )
        raise


def launch_layout(
    engine: Engine,
    topk_idx: torch.Tensor,
    num_experts: int,
    outputs: Outputs,
    zero_words: int = 0,
) -> None:
    """Launch the kernel that fills tokens per rank, per node and per expert, and the ranks of each token."""
    tokens, topk = topk_idx.shape
    sizes = C.normal.Sizes(tokens, 0, topk, num_experts, id_bytes=topk_idx.element_size())
    per_rank, per_node, per_expert, in_rank = (0 if tensor is None else tensor.data_ptr() for tensor in outputs)
    ids, blocks = topk_idx.data_ptr(), engine.device.blocks

    def launch() -> int:
        return C.normal.layout(
            engine.runtime,
            sizes,
            topk_idx=ids,
            tokens_per_rank=per_rank,
            tokens_per_node=per_node,
            tokens_per_expert=per_expert,
            is_token_in_rank=in_rank,
            blocks=blocks,
            zero_words=zero_words,
        )

    engine.launch_alone((topk_idx, *outputs), launch)


def warmup(engine: Engine, row_bytes: int, topk: int) -> None:
    """Prepare all kernels for these rows on all ranks. Collective."""
    kernels = way_of(engine.topology).kernels
    engine.prepare(0, topk, "layout")
    engine.prepare(row_bytes, topk, *kernels)
    engine.prepare(row_bytes, 0, *kernels)
    engine.meet()


def check_room(engine: Engine, sizes: C.normal.Sizes) -> None:
    """Raise if a call of these sizes does not fit even in rounds, or with this number of ranks."""
    calls = way_of(engine.topology).calls
    max_ranks = calls.max_ranks(engine.runtime, sizes.experts)
    if engine.ranks > max_ranks:
        raise ValueError(
            f"group.size()={engine.ranks}: expected at most {max_ranks} ranks, which is what a thread block's shared "
            "memory has room for on this device"
        )
    needed = calls.min_region_bytes(engine.runtime, sizes)
    if needed > engine.region_bytes:
        needed = -(-needed // REGION_ALIGNMENT) * REGION_ALIGNMENT * engine.regions
        raise ValueError(f"{engine.too_small(needed)} for rows of {sizes.row_bytes} bytes among {engine.ranks} ranks")
    message, most = calls.put_bytes(engine.runtime, sizes)
    if message > most:
        raise ValueError(
            f"nic: a send queue holds {most} bytes at once, expected at least {message}, a message with a row "
            f"of {sizes.row_bytes} bytes; increase blocks or max_bytes"
        )
