"""A dispatch and a combine, from checked arguments to results, in the steps that the host takes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from . import arguments
from .events import EventHandle, EventOverlap
from .handles import DispatchHandle, Plan
from .native import C

if TYPE_CHECKING:
    from .config import Config
    from .engine import Engine


def _row_bytes(x: torch.Tensor) -> int:
    return x.shape[1] * x.element_size()


@dataclass
class _Pending:
    """An operation that has taken its number: peers count on its end."""

    engine: Engine
    call: Any
    operation: int
    blocks: int
    finished: bool = field(default=False, init=False)

    def finish(self) -> tuple[Any, ...]:
        """Do the rest and wait for it."""
        self.finished = True
        with self.engine.telling_others(self.call.kind):
            return self._finish()

    def _finish(self) -> tuple[Any, ...]:
        raise NotImplementedError

    def __del__(self) -> None:
        # The peers wait for rows that will never come: better that they hear it now.
        if not self.finished:
            self.engine.break_off(f"operation {self.operation} was begun and dropped")


@dataclass
class PendingDispatch(_Pending):
    """A dispatch whose counts are on their way."""

    sizes: Any
    x: torch.Tensor
    topk_idx: torch.Tensor | None
    topk_weights: torch.Tensor | None
    plan: Plan
    handle: DispatchHandle | None
    is_token_in_rank: torch.Tensor
    expert_alignment: int

    @staticmethod
    def begin(
        engine: Engine,
        x: torch.Tensor,
        handle: DispatchHandle | None = None,
        num_tokens_per_rank: torch.Tensor | None = None,
        num_tokens_per_rdma_rank: torch.Tensor | None = None,
        is_token_in_rank: torch.Tensor | None = None,
        num_tokens_per_expert: torch.Tensor | None = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> PendingDispatch:
        """Check the arguments and launch the first kernel."""
        ranks, device = engine.ranks, engine.device.torch_device
        arguments.overlap(previous_event, async_finish, allocate_on_comm_stream)
        arguments.integer("expert_alignment", expert_alignment, 1, 1 << 20)
        if arguments.integer("num_worst_tokens", num_worst_tokens, 0, 1 << 31):
            raise ValueError(
                f"num_worst_tokens={num_worst_tokens}: expected 0, fixed output sizes are not supported yet"
            )
        blocks = arguments.config(config, engine.device.blocks)
        if handle is not None:
            return PendingDispatch._begin_cached(engine, x, handle, blocks, topk_idx, topk_weights)

        x = arguments.rows("x", x, device)
        tokens, row_bytes = x.shape[0], _row_bytes(x)
        arguments.tensor("num_tokens_per_rank", num_tokens_per_rank, torch.int32, (ranks,), device)
        in_rank = arguments.tensor("is_token_in_rank", is_token_in_rank, torch.bool, (tokens, ranks), device)
        per_expert = arguments.tensor("num_tokens_per_expert", num_tokens_per_expert, torch.int32, (None,), device)
        experts = arguments.experts(per_expert.shape[0], ranks, "len(num_tokens_per_expert)")
        if (topk_idx is None) != (topk_weights is None):
            raise ValueError("topk_idx and topk_weights: expected both or neither")
        topk = 0
        if topk_idx is not None:
            topk = arguments.topk_idx(topk_idx, experts, device, tokens).shape[1]
            arguments.tensor("topk_weights", topk_weights, torch.float32, (tokens, topk), device)
        sizes = C.Sizes(tokens, row_bytes, topk, experts)
        engine.check_room(sizes, row_bytes)

        engine.prepare(sizes, "notify", "dispatch")

        plan = Plan.empty(tokens, ranks, device)
        tensors = (x, in_rank, per_expert, topk_idx, topk_weights, plan)
        with engine.opening("dispatch", tensors) as operation:
            call = engine.runtime.notify(
                sizes, in_rank.data_ptr(), per_expert.data_ptr(), plan.native(), plan.rows_to_rank.data_ptr(), blocks
            )
            pending = PendingDispatch(
                engine,
                call,
                operation,
                blocks,
                sizes,
                x,
                topk_idx,
                topk_weights,
                plan,
                None,
                in_rank,
                expert_alignment,
            )
        return pending

    @staticmethod
    def _begin_cached(
        engine: Engine, x: torch.Tensor, handle: DispatchHandle, blocks: int, topk_idx: Any, topk_weights: Any
    ) -> PendingDispatch:
        handle = check_handle(engine, handle)
        if topk_idx is not None or topk_weights is not None:
            raise ValueError(
                "topk_idx, topk_weights: expected None with a handle, a cached dispatch carries rows alone"
            )
        x = arguments.rows("x", x, engine.device.torch_device, handle.tokens)
        sizes = C.Sizes(handle.tokens, _row_bytes(x), 0, 0)
        engine.check_room(sizes, _row_bytes(x))
        engine.prepare(sizes, "notify_cached", "dispatch")
        with engine.opening("cached dispatch", (x, handle)) as operation:
            call = engine.runtime.notify_cached(False, sizes, handle.operation)
            pending = PendingDispatch(
                engine, call, operation, blocks, sizes, x, None, None, handle.plan, handle, handle[4], 1
            )
        return pending

    def _finish(self) -> tuple[Any, ...]:
        """Wait for the counts, make the outputs, move the rows."""
        engine, call, cached = self.engine, self.call, self.handle is not None
        if self.handle is not None:
            rows = self.handle.rows
        else:
            engine.runtime.wait_counts(call)
            engine.check_failure(call)
            rows = call.total_rows
        recv_x = engine.empty((rows, self.x.shape[1]), self.x.dtype)
        recv_topk_idx = recv_topk_weights = recv_src_idx = None
        if self.topk_idx is not None:
            recv_topk_idx = engine.empty((rows, self.topk_idx.shape[1]), torch.int64)
            recv_topk_weights = engine.empty((rows, self.topk_idx.shape[1]), torch.float32)
        if not cached:
            recv_src_idx = engine.empty((rows,), torch.int32)

        tensors = C.Tensors()
        tensors.x = self.x.data_ptr()
        tensors.recv_x = recv_x.data_ptr()
        if self.topk_idx is not None and self.topk_weights is not None:
            tensors.topk_idx, tensors.topk_weights = self.topk_idx.data_ptr(), self.topk_weights.data_ptr()
        if recv_topk_idx is not None and recv_topk_weights is not None:
            tensors.recv_topk_idx, tensors.recv_topk_weights = recv_topk_idx.data_ptr(), recv_topk_weights.data_ptr()
        if recv_src_idx is not None:
            tensors.recv_src_idx = recv_src_idx.data_ptr()
        engine.hold(self.operation, recv_x, recv_topk_idx, recv_topk_weights, recv_src_idx)
        direct = engine.runtime.dispatch(call, self.sizes, tensors, self.plan.native(), rows, cached, self.blocks)
        engine.end_operation(call, self.operation, direct)
        engine.stats["cached_dispatches" if cached else "dispatches"] += 1
        event = EventOverlap(EventHandle())
        if recv_src_idx is None:
            return recv_x, None, None, None, None, event
        align = self.expert_alignment
        counts = [(count + align - 1) // align * align for count in call.rows_per_expert]
        topk = 0 if self.topk_idx is None else self.topk_idx.shape[1]
        handle = DispatchHandle.make(engine, self.plan, self.is_token_in_rank, recv_src_idx, topk, call.operation)
        return recv_x, recv_topk_idx, recv_topk_weights, counts, handle, event


@dataclass
class PendingCombine(_Pending):
    """A combine that has taken its number."""

    sizes: Any
    x: torch.Tensor
    topk_weights: torch.Tensor | None
    biases: tuple[torch.Tensor, ...]
    handle: DispatchHandle

    @staticmethod
    def begin(
        engine: Engine,
        x: torch.Tensor,
        handle: DispatchHandle,
        topk_weights: torch.Tensor | None,
        bias: Any,
        config: Config | None,
    ) -> PendingCombine:
        """Check the arguments and launch the first kernel."""
        handle = check_handle(engine, handle)
        blocks = arguments.config(config, engine.device.blocks)
        device = engine.device.torch_device
        x = arguments.rows("x", x, device, handle.rows)
        topk = 0
        if topk_weights is not None:
            topk_weights = arguments.tensor(
                "topk_weights", topk_weights, torch.float32, (handle.rows, handle.topk or None), device
            )
            topk = topk_weights.shape[1]
            if not 1 <= topk <= arguments.MAX_TOPK:
                raise ValueError(f"topk_weights: {topk} columns, expected 1 to {arguments.MAX_TOPK}")
        biases = arguments.biases(bias, (handle.tokens, x.shape[1]), device)
        sizes = C.Sizes(handle.tokens, _row_bytes(x), topk, 0)
        engine.check_room(sizes, _row_bytes(x))
        engine.prepare(sizes, "notify_cached", "combine")
        with engine.opening("combine", (x, handle, topk_weights, biases)) as operation:
            call = engine.runtime.notify_cached(True, sizes, handle.operation)
            pending = PendingCombine(engine, call, operation, blocks, sizes, x, topk_weights, biases, handle)
        return pending

    def _finish(self) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        """Move and sum the rows."""
        engine, handle = self.engine, self.handle
        # Owners read the rows where they are. One copy to where they can costs less than the handshakes of chunks.
        x, weights = engine.visible(self.x, self.topk_weights)
        assert x is not None
        # From the arena, though no peer needs it: its pages are there already, torch would map fresh ones every time.
        combined_x = engine.empty((handle.tokens, self.x.shape[1]), self.x.dtype)
        combined_weights = None
        tensors = C.Tensors()
        tensors.x = x.data_ptr()
        tensors.recv_x = combined_x.data_ptr()
        tensors.recv_src_idx = handle.recv_src_idx.data_ptr()
        if weights is not None:
            combined_weights = weights.new_empty((handle.tokens, weights.shape[1]))
            tensors.topk_weights, tensors.recv_topk_weights = weights.data_ptr(), combined_weights.data_ptr()
        for slot, bias in zip(("bias0", "bias1"), self.biases, strict=False):
            setattr(tensors, slot, bias.data_ptr())
        engine.hold(self.operation, x, weights, combined_x, combined_weights)
        direct = engine.runtime.combine(self.call, self.sizes, tensors, handle.plan.native(), handle.rows, self.blocks)
        engine.end_operation(self.call, self.operation, direct)
        engine.stats["combines"] += 1
        engine.stats["copied"] += x is not self.x
        return combined_x, combined_weights, EventOverlap(EventHandle())


def check_handle(engine: Engine, handle: Any) -> DispatchHandle:
    """Check that a handle is of this Buffer."""
    if not isinstance(handle, DispatchHandle):
        raise TypeError(f"handle={type(handle).__name__}: expected the handle that dispatch returned")
    if handle.owner is not engine:
        raise ValueError("handle: expected one of this Buffer, this is another Buffer's")
    return handle
