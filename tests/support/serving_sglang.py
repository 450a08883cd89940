"""The way SGLang uses low-latency mode, and normal mode beside it: see `serving`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

import oracle
from harness import Trial
from low_latency import Cast, Sizes, Work, check_combine, check_dispatch
from serving import Hook

NORMAL, LOW_LATENCY, AUTO = "normal", "low latency", "auto"
ALIGNMENT = 128
"""Alignment of the counts that a normal-mode dispatch of SGLang returns."""


class SglangProcess:
    """The Buffer of all layers and batches, created on first use, and the mode of the last call.

    Parameters
    ----------
    group
        The ranks.
    sizes
        Sizes of the model's layers.
    mode
        LOW_LATENCY, or AUTO: prefill in normal mode, decode in low-latency mode.
    param_bytes
        Bytes of an element that normal mode sends: 1 with FP8, although results are returned as bfloat16.
    """

    def __init__(self, group: Any, sizes: Sizes, mode: str, param_bytes: int = 2) -> None:
        self.group, self.sizes, self.mode, self.param_bytes = group, sizes, mode, param_bytes
        self.last: str | None = None
        self.buffer: Any = None

    def buffer_for(self, mode: str) -> Any:
        """Return the Buffer for a call in a mode; clean it where low-latency mode follows normal mode."""
        sizes = self.sizes
        if self.last == NORMAL and mode == LOW_LATENCY:
            self.buffer.clean_low_latency_buffer(sizes.max_tokens, sizes.hidden, sizes.experts)
        self.last = mode
        if self.buffer is None:
            self.buffer = self._make()
        return self.buffer

    def _make(self) -> Any:
        from deep_ep import Buffer

        sizes, ranks, nvl, queues = self.sizes, self.group.size(), 0, self.sizes.local
        rdma = Buffer.get_low_latency_rdma_size_hint(sizes.max_tokens, sizes.hidden, ranks, sizes.experts)
        if self.mode == AUTO:
            row_bytes = sizes.hidden * self.param_bytes
            for config in (Buffer.get_dispatch_config(ranks), Buffer.get_combine_config(ranks)):
                nvl = max(nvl, config.get_nvl_buffer_size_hint(row_bytes, ranks))
                rdma = max(rdma, config.get_rdma_buffer_size_hint(row_bytes, ranks))
            queues = max(queues, Buffer.num_sms)
        return Buffer(self.group, nvl, rdma, low_latency_mode=True, num_qps_per_rank=queues, allow_mnnvl=True)


class SglangDecode:
    """A dispatcher's low-latency stages, `a` and `b` of dispatch and combine, each checked at its end.

    No stage keeps its inputs for the next: neither the tokens nor, after `combine_a`, the results, the weights and the
    handle.

    Parameters
    ----------
    process
        The holder of the Buffer.
    cast
        How rows are sent; its other flags are passed only together with `use_fp8`.
    hooks
        Whether `b` calls a hook; otherwise it waits for an event.
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
            sizes.max_tokens,
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
        """Overwrite freed memory, if the library has released it."""
        sizes = self.process.sizes
        for shape, dtype in (
            ((sizes.local, sizes.rows, sizes.hidden), torch.bfloat16),
            ((sizes.max_tokens, sizes.hidden), torch.bfloat16),
            ((sizes.max_tokens, sizes.topk), torch.float32),
        ):
            torch.full(shape, torch.nan, dtype=dtype)
        torch.full((sizes.max_tokens, sizes.topk), -1, dtype=torch.int64)


class SglangPrefill:
    """A dispatcher's normal-mode stages. Rows are quantized before they are sent if `cast` says so.

    Parameters
    ----------
    process
        The holder of the Buffer.
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
"""Stages by which the first of two batches is ahead in decoding."""


def sglang_decode(stages: SglangDecode, works: Sequence[Work]) -> Iterator[None]:
    """Take a batch through the layers in decoding; yields where the other batch continues."""
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
