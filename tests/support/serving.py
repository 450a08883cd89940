"""How vLLM and SGLang call low-latency mode: which call follows which, with which arguments, on whose thread hooks run,
and what is freed or written over between a call and its hook.

Written anew from what the engines do; the code is not theirs. Experts are played by the results of a `Work`, so that
every tensor is compared with the oracle bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

import oracle
from harness import Trial
from low_latency import GROUP, Cast, Sizes, Work, check_combine, check_dispatch

Hook = Callable[[], None]
Step = Callable[[int, Callable[[], Any]], Any]
NORMAL, LOW_LATENCY, AUTO = "normal", "low latency", "auto"
ALIGNMENT = 128
"""Of the counts that a normal-mode dispatch of SGLang returns."""


def works_of(sizes: Sizes, layers: int, seed: int, padding: int = 0) -> list[Work]:
    """Make one for each layer. The last tokens of a rank, at most `padding`, choose no expert: engines fill a batch up
    to a size that a CUDA graph was captured for.
    """
    made = []
    for layer in range(layers):
        work = Work.of(sizes, seed + layer, results=False)
        for ids in work.topk_idx:
            if padding:
                ids[-padding:] = -1
        random = torch.Generator().manual_seed(seed + layer)
        made.append(Work.on(sizes, work.x, work.topk_idx, work.weights, random))
    return made


def on_this_thread(batch: int, go_on: Callable[[], Any]) -> Any:
    """Have a micro-batch go on."""
    return go_on()


def take_turns(batches: Sequence[Iterator[None]], lead: int = 0, step: Step = on_this_thread) -> None:
    """Let micro-batches go on in turns, each up to its next `yield`, until all have ended.

    Parameters
    ----------
    batches
        The micro-batches.
    lead
        Turns by which the first is ahead.
    step
        Has a micro-batch, by its number, go on; may do so on a thread of its own.
    """
    ended = object()
    for _ in range(lead):
        step(0, lambda: next(batches[0], ended))
    running = list(range(len(batches)))
    while running:
        running = [batch for batch in running if step(batch, lambda batch=batch: next(batches[batch], ended)) is None]


# --- vLLM -----------------------------------------------------------------------------------------------------------


class VllmBuffers:
    """A process's Buffers, found by the arguments they were made with: all layers of a model share one."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.cache: WeakValueDictionary[tuple, Any] = WeakValueDictionary()

    def get(self, sizes: Sizes, fault_tolerance: bool = False) -> Any:
        """Return that of a model."""
        from deep_ep import Buffer

        arguments = {
            "group": self.group,
            "num_nvl_bytes": 16 << 20,  # the environment says how many
            "num_rdma_bytes": Buffer.get_low_latency_rdma_size_hint(
                num_max_dispatch_tokens_per_rank=sizes.most_tokens,
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

    Of two, each receives for the other before it sends next, on its own thread. That of a batch alone is called at
    once.
    """

    def __init__(self, batches: int) -> None:
        self.left: list[Hook | None] = [None] * batches

    def leave(self, batch: int, hook: Hook | None) -> None:
        """Leave one to the other micro-batch."""
        if hook is None:
            return
        if len(self.left) == 1:
            hook()
            return
        other = (batch + 1) % len(self.left)
        assert self.left[other] is None, "at most one call of a micro-batch is on its way"
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
        The model's.
    sizes
        Of the layer.
    cast
        bfloat16, FP8, or FP8 with UE8M0 scales. Scales are rounded if and only if they are exponents.
    """

    def __init__(self, buffer: Any, sizes: Sizes, cast: Cast) -> None:
        assert cast.round_scale == cast.use_ue8m0
        self.buffer, self.sizes, self.cast = buffer, sizes, cast
        self.handles: list[Any] = [None, None]

    def prepare_async(self, batch: int, x: Tensor, ids: Tensor) -> tuple[Hook, Callable[[], tuple[Any, Tensor]]]:
        """Send; return the hook, and what there is to say once it has been called."""
        assert ids.dtype == torch.int64
        packed, counts, self.handles[batch], _, hook = self.buffer.low_latency_dispatch(
            x,
            ids,
            self.sizes.most_tokens,
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
        """Return the results to `out`, which the hook completes if there is one. What combine returns is dropped."""
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
    """Make float32 rows of FP8 ones, as vLLM does for experts that want another quantisation. It takes for granted that
    the rows are contiguous.
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
    """A micro-batch's way through the layers, all checked. It yields where the other's thread goes on.

    Parameters
    ----------
    layers
        The layers.
    works
        What each has to do.
    tensors
        The micro-batch's expert ids and weights in each.
    batch
        The micro-batch's number.
    hooks
        Those that micro-batches leave for each other.
    hidden
        The micro-batch's part of the hidden states.
    hooked, in_place
        As `vllm_run` takes them.
    """
    sizes, rank = layers[0].sizes, layers[0].buffer.rank
    # Experts write to the beginning of a larger workspace, which is used for something else after that.
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
        The model's.
    works
        For each micro-batch, one or two, what each layer has to do.
    cast
        How rows are sent.
    hooked
        Whether results come back by a hook; a batch alone may also wait in the call.
    in_place
        Whether they come back to the hidden states; else to a new tensor.
    step
        As `take_turns` takes it.
    """
    rank, count, sizes = buffer.rank, len(works), works[0][0].sizes
    tokens = [len(own[0].x[rank]) for own in works]
    # Micro-batches are parts of one batch: their tensors begin wherever the other's end.
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
    """Compare the rows that tokens were sent to."""
    for expert, pairs in enumerate(work.packed[rank].pairs):
        if pairs:
            values, scales = cast.of(torch.stack([work.x[source][token] for source, token in pairs]))
            wanted = values.float() * scales.repeat_interleave(GROUP, dim=1)
            assert torch.equal(rows[expert, : len(pairs)], wanted)


# --- SGLang ---------------------------------------------------------------------------------------------------------


class SglangProcess:
    """The Buffer of all layers and batches, made when it is first needed, and the mode of the last call.

    Parameters
    ----------
    group
        The ranks.
    sizes
        Of the model's layers.
    mode
        LOW_LATENCY, or AUTO: prefill in normal mode, decode in low-latency mode.
    param_bytes
        Of an element that normal mode sends: 1 with FP8, although results are returned as bfloat16.
    """

    def __init__(self, group: Any, sizes: Sizes, mode: str, param_bytes: int = 2) -> None:
        self.group, self.sizes, self.mode, self.param_bytes = group, sizes, mode, param_bytes
        self.last: str | None = None
        self.buffer: Any = None

    def buffer_for(self, mode: str) -> Any:
        """Return the Buffer for a call of a mode; clean it where low-latency mode follows normal mode."""
        sizes = self.sizes
        if self.last == NORMAL and mode == LOW_LATENCY:
            self.buffer.clean_low_latency_buffer(sizes.most_tokens, sizes.hidden, sizes.experts)
        self.last = mode
        if self.buffer is None:
            self.buffer = self._make()
        return self.buffer

    def _make(self) -> Any:
        from deep_ep import Buffer

        sizes, ranks, nvl, queues = self.sizes, self.group.size(), 0, self.sizes.local
        rdma = Buffer.get_low_latency_rdma_size_hint(sizes.most_tokens, sizes.hidden, ranks, sizes.experts)
        if self.mode == AUTO:
            row_bytes = sizes.hidden * self.param_bytes
            for config in (Buffer.get_dispatch_config(ranks), Buffer.get_combine_config(ranks)):
                nvl = max(nvl, config.get_nvl_buffer_size_hint(row_bytes, ranks))
                rdma = max(rdma, config.get_rdma_buffer_size_hint(row_bytes, ranks))
            queues = max(queues, Buffer.num_sms)
        return Buffer(self.group, nvl, rdma, low_latency_mode=True, num_qps_per_rank=queues, allow_mnnvl=True)


class SglangDecode:
    """A dispatcher's low-latency stages, `a` and `b` of dispatch and combine, each checked when it has ended.

    Nothing that a stage was given is kept to the next: neither the tokens, nor after `combine_a` the results, the
    weights and the handle.

    Parameters
    ----------
    process
        What holds the Buffer.
    cast
        How rows are sent; its other flags are given with `use_fp8` alone.
    hooks
        Whether `b` calls a hook; else it waits for an event.
    """

    def __init__(self, process: SglangProcess, cast: Cast, hooks: bool) -> None:
        self.process, self.cast, self.hooks = process, cast, hooks
        self.handle: Any = None
        self.state: Any = None

    def dispatch_a(self, work: Work) -> None:
        buffer, sizes = self.process.buffer_for(LOW_LATENCY), self.process.sizes
        x, ids = work.x[buffer.rank].clone(), work.topk_idx[buffer.rank].to(torch.int64)
        scales = {"round_scale": self.cast.round_scale, "use_ue8m0": self.cast.use_ue8m0}
        packed, counts, self.handle, event, hook = buffer.low_latency_dispatch(
            x,
            ids,
            sizes.most_tokens,
            sizes.experts,
            use_fp8=self.cast.use_fp8,
            async_finish=not self.hooks,
            return_recv_hook=self.hooks,
            **(scales if self.cast.use_fp8 else {}),
        )
        if self.hooks:
            x.fill_(torch.nan)  # it has been sent
        del x, ids
        self._reuse_memory()
        self.state = packed, counts, event, hook

    def dispatch_b(self, work: Work) -> None:
        packed, counts, event, hook = self.state
        self._wait(event, hook)
        check_dispatch(work, self.process.buffer.rank, self.cast, (packed, counts, self.handle))
        self.state = None

    def combine_a(self, work: Work) -> None:
        buffer = self.process.buffer_for(LOW_LATENCY)
        rank = buffer.rank
        results = work.results[rank].clone()
        combined, event, hook = buffer.low_latency_combine(
            x=results,
            topk_idx=work.topk_idx[rank].to(torch.int64),
            topk_weights=work.weights[rank].clone(),
            handle=self.handle,
            async_finish=not self.hooks,
            return_recv_hook=self.hooks,
        )
        if self.hooks:
            results.fill_(torch.nan)
        del results
        self.handle = None
        self._reuse_memory()
        self.state = combined, event, hook

    def combine_b(self, work: Work) -> None:
        combined, event, hook = self.state
        self._wait(event, hook)
        check_combine(work, self.process.buffer.rank, combined)
        self.state = None

    def _wait(self, event: Any, hook: Hook | None) -> None:
        assert (hook is not None) == self.hooks
        hook() if hook is not None else event.current_stream_wait()

    def _reuse_memory(self) -> None:
        """Write to what was freed, if the library has let it go."""
        sizes = self.process.sizes
        for shape, dtype in (
            ((sizes.local, sizes.rows, sizes.hidden), torch.bfloat16),
            ((sizes.most_tokens, sizes.hidden), torch.bfloat16),
            ((sizes.most_tokens, sizes.topk), torch.float32),
        ):
            torch.full(shape, torch.nan, dtype=dtype)
        torch.full((sizes.most_tokens, sizes.topk), -1, dtype=torch.int64)


class SglangPrefill:
    """A dispatcher's normal-mode stages. Rows are quantised before they are sent where `cast` says so.

    Parameters
    ----------
    process
        What holds the Buffer.
    cast
        bfloat16, or FP8 with float32 scales.
    """

    def __init__(self, process: SglangProcess, cast: Cast) -> None:
        self.process, self.cast = process, cast
        self.handle: Any = None
        self.event: Any = None

    def dispatch_a(self, trial: Trial) -> None:
        self.event = self._captured()

    def dispatch_b(self, trial: Trial) -> None:
        buffer, work = self.process.buffer_for(NORMAL), trial.work
        x, ids = work.x[buffer.rank], work.topk_idx[buffer.rank]
        per_rank, per_node, per_expert, in_rank, event = buffer.get_dispatch_layout(
            ids, work.num_experts, previous_event=self.event, async_finish=True, allocate_on_comm_stream=True
        )
        rows, topk_idx, topk_weights, counts, self.handle, event = buffer.dispatch(
            self.cast.of(x) if self.cast.use_fp8 else x,
            topk_idx=ids,
            topk_weights=work.topk_weights[buffer.rank],
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            previous_event=event,
            async_finish=True,
            allocate_on_comm_stream=True,
            expert_alignment=ALIGNMENT,
            config=None,
        )
        event.current_stream_wait()
        received = trial.received[buffer.rank]
        wanted: tuple[Tensor, ...] = (received.x,)
        if self.cast.use_fp8:
            wanted = self.cast.of(received.x)
        for got, expected in zip(rows if self.cast.use_fp8 else (rows,), wanted, strict=True):
            assert torch.equal(got.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))
        assert torch.equal(topk_idx, received.topk_idx) and torch.equal(topk_weights, received.topk_weights)
        assert counts == [-(-count // ALIGNMENT) * ALIGNMENT for count in received.num_tokens_per_expert]

    def combine_a(self, trial: Trial) -> None:
        self.event = self._captured()

    def combine_b(self, trial: Trial) -> None:
        buffer = self.process.buffer_for(NORMAL)
        combined, _, event = buffer.combine(
            trial.expert.x[buffer.rank],
            self.handle,
            async_finish=True,
            previous_event=self.event,
            allocate_on_comm_stream=True,
            config=None,
        )
        event.current_stream_wait()
        self.handle = None
        oracle.check_combined(combined, None, trial.expert.expected[0][buffer.rank])

    @staticmethod
    def _captured() -> Any:
        from deep_ep import Buffer

        return Buffer.capture()


DECODE_LEAD = 2
"""Stages by which the first batch is ahead when two decode."""


def sglang_decode(stages: SglangDecode, works: Sequence[Work]) -> Iterator[None]:
    """A batch's way through the layers in decoding; it yields where the other batch goes on."""
    for work in works:
        yield  # attention begins
        yield  # it ends, and experts are chosen
        stages.dispatch_a(work)
        yield
        stages.dispatch_b(work)
        stages.combine_a(work)
        yield
        stages.combine_b(work)
        yield


def sglang_prefill(stages: Any, works: Sequence[Any]) -> Iterator[None]:
    """The same in prefill, where both batches send before either receives."""
    for work in works:
        stages.dispatch_a(work)
        yield
        stages.dispatch_b(work)
        stages.combine_a(work)
        yield
        stages.combine_b(work)
