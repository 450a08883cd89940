"""The way vLLM uses low-latency mode: see `serving`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from low_latency import GROUP, Cast, Sizes, Work, check_combine, check_dispatch
from serving import Hook, Step, on_this_thread, take_turns


class VllmBuffers:
    """A process's Buffers, keyed by their arguments: all layers of a model share one."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.cache: WeakValueDictionary[tuple, Any] = WeakValueDictionary()

    def get(self, sizes: Sizes, fault_tolerance: bool = False) -> Any:
        """Return the Buffer of a model."""
        from deep_ep import Buffer

        arguments = {
            "group": self.group,
            "num_nvl_bytes": 16 << 20,  # the environment sets the size
            "num_rdma_bytes": Buffer.get_low_latency_rdma_size_hint(
                num_max_dispatch_tokens_per_rank=sizes.max_tokens,
                hidden=sizes.hidden,
                num_ranks=sizes.ranks,
                num_experts=sizes.experts,
            ),
            "low_latency_mode": True,
            "num_qps_per_rank": sizes.local,
            "allow_nvlink_for_low_latency_mode": True,
            "allow_mnnvl": False,
            "explicitly_destroy": True,
            "enable_shrink": fault_tolerance,
        }
        key = tuple(arguments.values())
        buffer = self.cache.get(key)
        if buffer is None:
            buffer = self.cache[key] = Buffer(**arguments)
        return buffer


class VllmHooks:
    """The hooks that micro-batches leave for each other.

    Each of two micro-batches receives for the other, on its own thread, before it sends next. The hook of a single
    micro-batch is called immediately.
    """

    def __init__(self, batches: int) -> None:
        self.left: list[Hook | None] = [None] * batches

    def leave(self, batch: int, hook: Hook | None) -> None:
        """Leave a hook to the other micro-batch."""
        if hook is None:
            return
        if len(self.left) == 1:
            hook()
            return
        other = (batch + 1) % len(self.left)
        assert self.left[other] is None, "at most one call of a micro-batch is in flight"
        self.left[other] = hook

    def receive(self, batch: int) -> None:
        """Call the hook that was left to a micro-batch."""
        hook, self.left[batch] = self.left[batch], None
        if hook is not None:
            hook()


class VllmLayer:
    """Prepare and finalize of a layer, with a handle for each micro-batch.

    Parameters
    ----------
    buffer
        The model's Buffer.
    sizes
        Sizes of the layer.
    cast
        bfloat16, FP8, or FP8 with UE8M0 scales. Scales are rounded if and only if they are exponents.
    """

    def __init__(self, buffer: Any, sizes: Sizes, cast: Cast) -> None:
        assert cast.round_scale == cast.use_ue8m0
        self.buffer, self.sizes, self.cast = buffer, sizes, cast
        self.handles: list[Any] = [None, None]

    def prepare_async(self, batch: int, x: Tensor, ids: Tensor) -> tuple[Hook, Callable[[], tuple[Any, Tensor]]]:
        """Send. Returns the hook, and a function that returns the received data once the hook has been called."""
        assert ids.dtype == torch.int64
        packed, counts, self.handles[batch], _, hook = self.buffer.low_latency_dispatch(
            x,
            ids,
            self.sizes.max_tokens,
            self.sizes.experts,
            use_fp8=self.cast.use_fp8,
            round_scale=self.cast.use_ue8m0,
            use_ue8m0=self.cast.use_ue8m0,
            async_finish=False,
            return_recv_hook=True,
        )
        return hook, lambda: (packed, counts)

    def finalize(
        self, batch: int, out: Tensor, results: Tensor, weights: Tensor, ids: Tensor, hooked: bool
    ) -> Hook | None:
        """Return the results to `out`, which the hook completes if there is one. The tensor that combine returns is
        dropped."""
        _, _, hook = self.buffer.low_latency_combine(
            results,
            ids,
            weights,
            self.handles[batch],
            async_finish=False,
            zero_copy=False,
            return_recv_hook=hooked,
            out=out,
        )
        assert (hook is not None) == hooked
        return hook


def dequantized(packed: tuple[Tensor, Tensor]) -> Tensor:
    """Convert FP8 rows to float32, as vLLM does for experts that need another quantization. It assumes that the rows
    are contiguous.
    """
    rows, scales = packed
    assert rows.is_contiguous()
    groups = rows.float().view(len(rows), -1, GROUP)
    return (groups * scales.contiguous().view(len(rows), -1, 1)).view(rows.shape)


def vllm_forward(
    layers: Sequence[VllmLayer],
    works: Sequence[Work],
    tensors: Sequence[tuple[Tensor, Tensor]],
    batch: int,
    hooks: VllmHooks,
    hidden: Tensor,
    hooked: bool,
    in_place: bool,
) -> Iterator[None]:
    """Take a micro-batch through the layers, all checked. Yields where the other's thread continues.

    Parameters
    ----------
    layers
        The layers.
    works
        The work of each layer.
    tensors
        The micro-batch's expert ids and weights in each layer.
    batch
        The micro-batch's index.
    hooks
        The hooks that micro-batches leave for each other.
    hidden
        The micro-batch's part of the hidden states.
    hooked, in_place
        See `vllm_run`.
    """
    sizes, rank = layers[0].sizes, layers[0].buffer.rank
    # Experts write to the beginning of a larger workspace, which is reused for something else afterwards.
    shape = torch.Size((sizes.local, sizes.rows, sizes.hidden))
    workspace = torch.full((2 * shape.numel(),), torch.nan, dtype=torch.bfloat16)
    for layer, work, (ids, weights) in zip(layers, works, tensors, strict=True):
        hidden.copy_(work.x[rank])
        hooks.receive(batch)
        hook, receive = layer.prepare_async(batch, hidden, ids)
        hooks.leave(batch, hook)
        yield
        packed, counts = receive()
        check_dispatch(work, rank, layer.cast, (packed, counts, layer.handles[batch]))
        if layer.cast.use_fp8 and not layer.cast.use_ue8m0:
            check_dequantized(work, rank, layer.cast, dequantized(packed))
        results = workspace[: shape.numel()].view(shape)
        results.copy_(work.results[rank])
        hooks.receive(batch)
        out = hidden if in_place else torch.full_like(hidden, torch.nan)
        hook = layer.finalize(batch, out, results, weights, ids, hooked)
        workspace.fill_(torch.nan)
        hooks.leave(batch, hook)
        yield
        check_combine(work, rank, out)
    hooks.receive(batch)


def vllm_run(
    buffer: Any,
    works: Sequence[Sequence[Work]],
    cast: Cast,
    hooked: bool = True,
    in_place: bool = True,
    step: Step = on_this_thread,
) -> None:
    """Take a batch through the layers of a model, on the calling rank.

    Parameters
    ----------
    buffer
        The model's Buffer.
    works
        For each of one or two micro-batches, the work of each layer.
    cast
        How rows are sent.
    hooked
        Whether results return through a hook; a single batch may also wait in the call.
    in_place
        Whether results return to the hidden states; otherwise to a new tensor.
    step
        See `take_turns`.
    """
    rank, count, sizes = buffer.rank, len(works), works[0][0].sizes
    tokens = [len(own[0].x[rank]) for own in works]
    # Micro-batches are parts of one batch, so their tensors begin where the previous one's end.
    hidden = torch.empty((sum(tokens), sizes.hidden), dtype=torch.bfloat16).split(tokens)
    tensors = [
        list(
            zip(
                torch.cat([work.topk_idx[rank] for work in layer]).split(tokens),
                torch.cat([work.weights[rank] for work in layer]).split(tokens),
            )
        )
        for layer in zip(*works, strict=True)
    ]
    layers = [VllmLayer(buffer, sizes, cast) for _ in tensors]
    hooks = VllmHooks(count)
    batches = [
        vllm_forward(
            layers, works[batch], [own[batch] for own in tensors], batch, hooks, hidden[batch], hooked, in_place
        )
        for batch in range(count)
    ]
    take_turns(batches, step=step)


def check_dequantized(work: Work, rank: int, cast: Cast, rows: Tensor) -> None:
    """Compare the rows that received tokens."""
    for expert, pairs in enumerate(work.packed[rank].pairs):
        if pairs:
            values, scales = cast.of(torch.stack([work.x[source][token] for source, token in pairs]))
            wanted = values.float() * scales.repeat_interleave(GROUP, dim=1)
            assert torch.equal(rows[expert, : len(pairs)], wanted)
