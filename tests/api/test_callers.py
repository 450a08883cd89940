"""The calls of real programs, through the names they import: Megatron-LM, torchtitan, XTuner, vLLM, SGLang, LMDeploy,
and DeepEP's own tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import oracle
from builds import SANITIZED
from cases import BY_NAME, Case
from harness import Trial, under_schedules
from names import deep_ep_names

RUNS = 1 if SANITIZED else 3

CASE = Case("callers", ranks=4, tokens=10, hidden=128, topk=4, experts=16, routing="holes")
TRIALS = [Trial.of(CASE, seed=seed) for seed in (1, 2)]


@pytest.fixture(autouse=True)
def names(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make `import deep_ep` find this library, with ranks that compute on the CPU."""
    monkeypatch.setenv("DEEP_EP_DEVICE", "cpu")
    with deep_ep_names():
        yield


def same(name: str, got: Tensor, expected: Tensor) -> None:
    wrong = oracle.difference(name, got, expected)
    assert wrong is None, wrong


# --- Megatron-LM: one Buffer per process, created or enlarged when needed; autograd functions ----------------------


class Megatron:
    """The state of one process."""

    def __init__(self, group: Any) -> None:
        from deep_ep import Buffer

        self.Buffer, self.group = Buffer, group
        self.buffer: Any = None
        self.made = 0

    def get_buffer(self, hidden_bytes: int) -> Any:
        size = self.group.size()
        configs = self.Buffer.get_dispatch_config(size), self.Buffer.get_combine_config(size)
        nvl = max(config.get_nvl_buffer_size_hint(hidden_bytes, size) for config in configs)
        rdma = max(config.get_rdma_buffer_size_hint(hidden_bytes, size) for config in configs)
        buffer = self.buffer
        if buffer is None or buffer.group != self.group or buffer.num_nvl_bytes < nvl or buffer.num_rdma_bytes < rdma:
            self.buffer = self.Buffer(self.group, nvl, rdma)
            self.made += 1
        return self.buffer

    def buffer_for(self, x: Tensor) -> Any:
        return self.get_buffer(x.size(1) * max(x.element_size(), 2))


def previous(asynchronous: bool) -> Any:
    from deep_ep.utils import EventHandle, EventOverlap

    return EventOverlap(EventHandle()) if asynchronous else None


class Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, idx: Tensor, probs: Tensor, process: Megatron, asynchronous: bool) -> Any:
        overlap = {"async_finish": asynchronous, "allocate_on_comm_stream": asynchronous}
        buffer = process.buffer_for(x)
        per_rank, per_node, per_expert, in_rank, event = buffer.get_dispatch_layout(
            idx, CASE.experts, previous_event=previous(asynchronous), **overlap
        )
        recv_x, recv_idx, recv_probs, counts, handle, after = buffer.dispatch(
            x,
            topk_idx=idx,
            topk_weights=probs,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            previous_event=event,
            **overlap,
        )
        if asynchronous:
            after.current_stream_wait()
        ctx.process, ctx.handle, ctx.overlap = process, handle, overlap
        return recv_x, recv_idx, recv_probs, torch.tensor(counts), handle

    @staticmethod
    def backward(ctx: Any, grad_x: Tensor, grad_idx: None, grad_probs: Tensor, *others: Any) -> Any:
        grad, grad_probs, after = ctx.process.buffer_for(grad_x).combine(
            grad_x.contiguous(),
            ctx.handle,
            topk_weights=grad_probs.float(),
            previous_event=previous(ctx.overlap["async_finish"]),
            **ctx.overlap,
        )
        after.current_stream_wait()
        return grad, None, grad_probs, None, None


class Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, process: Megatron, handle: tuple, asynchronous: bool) -> Any:
        ctx.overlap = {"async_finish": asynchronous, "allocate_on_comm_stream": asynchronous}
        combined, _, after = process.buffer_for(x).combine(
            x, handle=handle, previous_event=previous(asynchronous), **ctx.overlap
        )
        after.current_stream_wait()
        ctx.process, ctx.handle = process, handle
        return combined, None

    @staticmethod
    def backward(ctx: Any, grad: Tensor, nothing: None = None) -> Any:
        # torchtitan passes None for arguments that a cached dispatch does not use.
        grad_x, *_, after = ctx.process.buffer_for(grad).dispatch(
            x=grad.contiguous(),
            topk_idx=None,
            topk_weights=None,
            num_tokens_per_rank=None,
            num_tokens_per_rdma_rank=None,
            is_token_in_rank=None,
            num_tokens_per_expert=None,
            handle=ctx.handle,
            previous_event=previous(ctx.overlap["async_finish"]),
            **ctx.overlap,
        )
        after.current_stream_wait()
        return grad_x, None, None, None


@pytest.mark.parametrize("asynchronous", [False, True])
def test_megatron(asynchronous: bool) -> None:
    def on_each_rank(group: Any) -> None:
        process, rank = Megatron(group), group.rank()
        process.get_buffer(CASE.hidden)  # for a smaller layer
        layers = []
        for trial in TRIALS:
            work, expert = trial.work, trial.expert
            x, probs = work.x[rank].clone().requires_grad_(), work.topk_weights[rank].clone().requires_grad_()
            recv_x, recv_idx, recv_probs, counts, handle = Dispatch.apply(
                x, work.topk_idx[rank], probs, process, asynchronous
            )
            received = trial.received[rank]
            same("recv_x", recv_x, received.x)
            same("recv_idx", recv_idx, received.topk_idx)
            same("recv_probs", recv_probs, received.topk_weights)
            assert counts.tolist() == received.num_tokens_per_expert
            assert recv_x.requires_grad and recv_probs.requires_grad and not recv_idx.requires_grad
            rows = expert.x[rank].clone().requires_grad_()
            combined, _ = Combine.apply(rows, process, handle, asynchronous)
            oracle.check_combined(combined, None, expert.expected[0][rank])
            layers.append((trial, x, probs, recv_x, recv_probs, rows, combined))
        assert process.made == 2, "one Buffer for all layers"
        for trial, x, probs, recv_x, recv_probs, rows, combined in reversed(layers):
            # The gradient of dispatch is a combine, and that of combine is a dispatch: the oracle computes both.
            combined.backward(trial.work.x[rank])
            same("rows.grad", rows.grad, trial.received[rank].x)
            torch.autograd.backward((recv_x, recv_probs), (trial.expert.x[rank], trial.expert.topk_weights[rank]))
            oracle.check_combined(x.grad, probs.grad, trial.expert.expected[0][rank])

    under_schedules(CASE.ranks, on_each_rank, count=RUNS)


def test_megatron_enlarges_its_buffer_between_forward_and_backward() -> None:
    """The Buffer that replaces the smaller one, which no longer exists, must accept the handles of that one."""

    def on_each_rank(group: Any) -> None:
        process, rank, layers = Megatron(group), group.rank(), []
        for trial in TRIALS:
            work = trial.work
            x, probs = work.x[rank].clone().requires_grad_(), work.topk_weights[rank].clone().requires_grad_()
            recv_x, _, recv_probs, _, handle = Dispatch.apply(x, work.topk_idx[rank], probs, process, False)
            rows = trial.expert.x[rank].clone().requires_grad_()
            combined, _ = Combine.apply(rows, process, handle, False)
            layers.append((trial, x, probs, recv_x, recv_probs, rows, combined))
            process.get_buffer(4 * CASE.hidden * len(layers))  # for a layer with longer rows
        assert process.made == 3
        for trial, x, probs, recv_x, recv_probs, rows, combined in reversed(layers):
            combined.backward(trial.work.x[rank])
            same("rows.grad", rows.grad, trial.received[rank].x)
            torch.autograd.backward((recv_x, recv_probs), (trial.expert.x[rank], trial.expert.topk_weights[rank]))
            oracle.check_combined(x.grad, probs.grad, trial.expert.expected[0][rank])

    under_schedules(CASE.ranks, on_each_rank, count=RUNS)


# --- XTuner: normal-mode calls on a Buffer in low-latency mode; autograd saves the elements of handles --------------


class Xtuner:
    """The state of one process. Each call ensures that the Buffer is large enough."""

    def __init__(self, group: Any, experts: int) -> None:
        from deep_ep import Buffer

        self.Buffer, self.group, self.experts = Buffer, group, experts
        self.buffer: Any = None

    def get_buffer(self, hidden: int) -> Any:
        size, Buffer = self.group.size(), self.Buffer
        rdma = Buffer.get_low_latency_rdma_size_hint(128, hidden, size, self.experts)
        configs = Buffer.get_dispatch_config(size), Buffer.get_combine_config(size)
        nvl = max(config.get_nvl_buffer_size_hint(2 * hidden, size) for config in configs)
        rdma = max(rdma, *(config.get_rdma_buffer_size_hint(2 * hidden, size) for config in configs))
        if self.buffer is None:
            queue_pairs = max(self.experts // size, Buffer.num_sms // 2)
            self.buffer = Buffer(self.group, nvl, rdma, low_latency_mode=True, num_qps_per_rank=queue_pairs)
        assert nvl <= self.buffer.num_nvl_bytes and rdma <= self.buffer.num_rdma_bytes
        return self.buffer


def captured() -> Any:
    from deep_ep import EventOverlap
    from deep_ep_cpp import EventHandle

    return EventOverlap(EventHandle())


class XtunerDispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, idx: Tensor, probs: Tensor, process: Xtuner, previous_event: Any) -> Any:
        buffer = process.get_buffer(x.shape[-1])
        per_rank, per_node, per_expert, in_rank, previous_event = buffer.get_dispatch_layout(
            idx,
            process.experts,
            previous_event=previous_event,
            async_finish=True,
            allocate_on_comm_stream=previous_event is not None,
        )
        recv_x, recv_idx, recv_probs, counts, handle, event = buffer.dispatch(
            x,
            topk_idx=idx,
            topk_weights=probs,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            previous_event=previous_event,
            async_finish=True,
            allocate_on_comm_stream=True,
        )
        ctx.save_for_backward(*handle)
        ctx.process = process
        return recv_x, recv_idx, recv_probs, counts, handle, event

    @staticmethod
    def backward(ctx: Any, grad_x: Tensor, grad_idx: None, grad_probs: Tensor, *others: Any) -> Any:
        handle = ctx.saved_tensors
        grad, grad_probs, event = ctx.process.get_buffer(grad_x.shape[-1]).combine(
            grad_x,
            handle,
            topk_weights=grad_probs,
            async_finish=True,
            previous_event=captured(),
            allocate_on_comm_stream=True,
        )
        event.current_stream_wait()
        return grad, None, grad_probs, None, None


class XtunerCombine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, process: Xtuner, handle: tuple, previous_event: Any) -> Any:
        combined, _, event = process.get_buffer(x.shape[-1]).combine(
            x,
            handle,
            async_finish=True,
            previous_event=previous_event,
            allocate_on_comm_stream=previous_event is not None,
        )
        ctx.save_for_backward(*handle)
        ctx.process = process
        return combined, event

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *others: Any) -> Any:
        handle = ctx.saved_tensors
        grad_x, _, _, _, _, event = ctx.process.get_buffer(grad.shape[-1]).dispatch(
            grad,
            handle=handle,
            async_finish=True,
            previous_event=captured(),
            allocate_on_comm_stream=True,
        )
        event.current_stream_wait()
        return grad_x, None, None, None


@pytest.mark.parametrize("ranks_per_node", [4, 2])
@pytest.mark.parametrize("overlapped", [False, True])
def test_xtuner(overlapped: bool, ranks_per_node: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEP_EP_RANKS_PER_NODE", str(ranks_per_node))
    trials = [Trial.of(replace(CASE, ranks_per_node=ranks_per_node), seed=seed) for seed in (1, 2)]

    def on_each_rank(group: Any) -> None:
        process, rank, layers = Xtuner(group, CASE.experts), group.rank(), []
        for trial in trials:
            work, expert = trial.work, trial.expert
            event = captured() if overlapped else None
            x, probs = work.x[rank].clone().requires_grad_(), work.topk_weights[rank].clone().requires_grad_()
            recv_x, recv_idx, recv_probs, counts, handle, event = XtunerDispatch.apply(
                x, work.topk_idx[rank], probs, process, event
            )
            event.current_stream_wait()
            same("recv_x", recv_x, trial.received[rank].x)
            same("recv_idx", recv_idx, trial.received[rank].topk_idx)
            assert counts == trial.received[rank].num_tokens_per_expert
            rows = expert.x[rank].clone().requires_grad_()
            combined, event = XtunerCombine.apply(rows, process, handle, captured() if overlapped else None)
            event.current_stream_wait()
            oracle.check_combined(combined, None, expert.expected[0][rank])
            layers.append((trial, x, probs, recv_x, recv_probs, rows, combined))
        for trial, x, probs, recv_x, recv_probs, rows, combined in reversed(layers):
            combined.backward(trial.work.x[rank])
            same("rows.grad", rows.grad, trial.received[rank].x)
            torch.autograd.backward((recv_x, recv_probs), (trial.expert.x[rank], trial.expert.topk_weights[rank]))
            oracle.check_combined(x.grad, probs.grad, trial.expert.expected[0][rank])

    under_schedules(CASE.ranks, on_each_rank, count=RUNS)


# --- vLLM: high-throughput mode, one handle for each of two micro-batches -------------------------------------------


class VllmLayer:
    """Prepare and finalize, as a modular MoE kernel calls them."""

    KNOWN_RANKS = (2, 4, 8, 16, 24, 32, 64, 128, 144, 160)

    def __init__(self, buffer: Any, overlapped: bool) -> None:
        import deep_ep

        self.Buffer, self.buffer, self.overlapped = deep_ep.Buffer, buffer, overlapped
        self.handles: list[Any] = [None, None]

    def config(self, get: Callable[[int], Any]) -> Any:
        ranks = self.buffer.group_size
        return get(ranks) if ranks in self.KNOWN_RANKS else None

    def prepare(self, batch: int, work: oracle.Workload, rank: int) -> Callable[[], Any]:
        event = self.buffer.capture() if self.overlapped else None
        per_rank, per_node, per_expert, in_rank, _ = self.buffer.get_dispatch_layout(
            topk_idx=work.topk_idx[rank],
            num_experts=work.num_experts,
            previous_event=event,
            async_finish=False,
            allocate_on_comm_stream=False,
        )
        *results, self.handles[batch], after = self.buffer.dispatch(
            x=work.x[rank],
            handle=None,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=work.topk_idx[rank],
            topk_weights=work.topk_weights[rank],
            expert_alignment=1,
            config=self.config(self.Buffer.get_dispatch_config),
            previous_event=event,
            async_finish=not self.overlapped,
            allocate_on_comm_stream=False,
        )

        def receive() -> Any:
            if after.event is not None:
                after.current_stream_wait()
            return results

        return receive

    def finalize(self, batch: int, rows: Tensor, output: Tensor) -> Callable[[], None]:
        combined, _, after = self.buffer.combine(
            x=rows,
            handle=self.handles[batch],
            topk_weights=None,
            config=self.config(self.Buffer.get_combine_config),
            previous_event=self.buffer.capture() if self.overlapped else None,
            async_finish=not self.overlapped,
            allocate_on_comm_stream=False,
        )

        def receive() -> None:
            if after.event is not None:
                after.current_stream_wait()
            output.copy_(combined, non_blocking=True)

        return receive


@pytest.mark.parametrize("name", ["callers", "three_ranks", "ranks_that_receive_nothing"])
@pytest.mark.parametrize("overlapped", [False, True])
def test_vllm(overlapped: bool, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import deep_ep

    case = CASE if name == "callers" else BY_NAME[name]
    trials = [Trial.of(case, seed=seed) for seed in (1, 2)]
    for setting in ("num_sms", "_num_sms_is_set"):  # class attributes, set below
        monkeypatch.setattr(deep_ep.Buffer, setting, getattr(deep_ep.Buffer, setting))

    def on_each_rank(group: Any) -> None:
        buffer = deep_ep.Buffer(
            group=group,
            num_nvl_bytes=1 << 24,
            num_rdma_bytes=0,
            low_latency_mode=False,
            num_qps_per_rank=1,
            explicitly_destroy=True,
        )
        deep_ep.Buffer.set_num_sms(4)
        layer, rank = VllmLayer(buffer, overlapped), buffer.rank
        for batch, receive in enumerate([layer.prepare(b, trial.work, rank) for b, trial in enumerate(trials)]):
            recv_x, recv_idx, recv_weights, counts = receive()
            received = trials[batch].received[rank]
            same("recv_x", recv_x, received.x)
            same("recv_idx", recv_idx, received.topk_idx)
            same("recv_weights", recv_weights, received.topk_weights)
            assert counts == received.num_tokens_per_expert
        outputs = [torch.empty_like(trial.work.x[rank]) for trial in trials]
        receivers = [layer.finalize(b, trial.expert.x[rank], outputs[b]) for b, trial in enumerate(trials)]
        for batch, receive_output in enumerate(receivers):
            receive_output()
            oracle.check_combined(outputs[batch], None, trials[batch].expert.expected[0][rank])
        buffer.destroy()

    under_schedules(case.ranks, on_each_rank, count=RUNS)


# --- SGLang: two batches overlap, with two dispatchers on one Buffer ------------------------------------------------

NORMAL = {
    "num_sms": 6,
    "num_max_nvl_chunked_send_tokens": 16,
    "num_max_nvl_chunked_recv_tokens": 256,
    "num_max_rdma_chunked_send_tokens": 16,
    "num_max_rdma_chunked_recv_tokens": 128,
}


class SglangDispatcher:
    """The stages of one batch; `a` may run long before `b`."""

    def __init__(self, buffer: Any, trial: Trial, asynchronous: bool, config: Any) -> None:
        self.buffer, self.trial, self.asynchronous, self.config = buffer, trial, asynchronous, config
        self.handle: Any = None
        self.event: Any = None

    def a(self) -> None:
        self.event = type(self.buffer).capture() if self.asynchronous else None

    def dispatch_arguments(self) -> dict[str, Any]:
        work, rank = self.trial.work, self.buffer.rank
        per_rank, per_node, per_expert, in_rank, event = self.buffer.get_dispatch_layout(
            work.topk_idx[rank],
            work.num_experts,
            previous_event=self.event,
            async_finish=self.asynchronous,
            allocate_on_comm_stream=self.event is not None,
        )
        return {
            "x": work.x[rank],
            "topk_idx": work.topk_idx[rank],
            "topk_weights": work.topk_weights[rank],
            "num_tokens_per_rank": per_rank,
            "num_tokens_per_rdma_rank": per_node,
            "is_token_in_rank": in_rank,
            "num_tokens_per_expert": per_expert,
            "previous_event": event,
            "async_finish": self.asynchronous,
            "allocate_on_comm_stream": (event is not None) and self.asynchronous,
            "expert_alignment": 128,
            "config": self.config,
        }

    def dispatch_b(self) -> None:
        self.received(self.buffer.dispatch(**self.dispatch_arguments()))

    def received(self, results: Any) -> None:
        recv_x, recv_idx, recv_weights, counts, self.handle, event = results
        if self.asynchronous:
            event.current_stream_wait()
        expected = self.trial.received[self.buffer.rank]
        same("recv_x", recv_x, expected.x)
        same("recv_idx", recv_idx, expected.topk_idx)
        same("recv_weights", recv_weights, expected.topk_weights)
        assert counts == [-(-count // 128) * 128 for count in expected.num_tokens_per_expert]

    def combine_b(self) -> None:
        rank = self.buffer.rank
        combined, _, event = self.buffer.combine(
            self.trial.expert.x[rank],
            self.handle,
            async_finish=self.asynchronous,
            previous_event=self.event,
            allocate_on_comm_stream=self.event is not None,
            config=self.config,
        )
        if self.asynchronous:
            event.current_stream_wait()
        self.handle = None
        oracle.check_combined(combined, None, self.trial.expert.expected[0][rank])


@pytest.mark.parametrize("asynchronous", [False, True])
def test_sglang_two_batches(asynchronous: bool) -> None:
    from deep_ep import Buffer, Config

    def on_each_rank(group: Any) -> None:
        config = Config(**NORMAL)
        bytes_of_rows = config.get_nvl_buffer_size_hint(2 * CASE.hidden, group.size())
        buffer = Buffer(group, bytes_of_rows, 0, low_latency_mode=False, num_qps_per_rank=6, allow_mnnvl=True)
        first, second = (SglangDispatcher(buffer, trial, asynchronous, config) for trial in TRIALS)
        for _ in range(2):  # layers
            first.a()
            second.a()
            first.dispatch_b()
            second.dispatch_b()
            first.a()
            first.combine_b()
            first.a()
            second.a()
            first.dispatch_b()  # the first batch is a layer ahead
            second.combine_b()
            first.combine_b()

    under_schedules(CASE.ranks, on_each_rank, count=RUNS)


def test_sglang_auto_and_lmdeploy() -> None:
    """One Buffer serves both modes and is cleaned before each decoding phase."""
    from deep_ep import Buffer, Config

    def on_each_rank(group: Any) -> None:
        size, config = group.size(), Config(**NORMAL)
        nvl = config.get_nvl_buffer_size_hint(2 * CASE.hidden, size)
        rdma = Buffer.get_low_latency_rdma_size_hint(128, CASE.hidden, size, CASE.experts)
        buffer = Buffer(
            group,
            nvl,
            rdma,
            low_latency_mode=True,
            num_qps_per_rank=max(6, CASE.experts // size),
            allow_mnnvl=True,
        )
        dispatcher = SglangDispatcher(buffer, TRIALS[0], True, config)
        for _ in range(2):
            dispatcher.a()
            dispatcher.dispatch_b()
            dispatcher.combine_b()
            buffer.clean_low_latency_buffer(128, CASE.hidden, CASE.experts)
            work = TRIALS[0].work
            x, ids = work.x[buffer.rank], work.topk_idx[buffer.rank]
            packed, _, handle, _, hook = buffer.low_latency_dispatch(
                x, ids, 128, CASE.experts, use_fp8=False, async_finish=False, return_recv_hook=True
            )
            hook()
            weights = torch.full(ids.shape, 0.5)
            combined, _, hook = buffer.low_latency_combine(
                packed, topk_idx=ids, topk_weights=weights, handle=handle, async_finish=False, return_recv_hook=True
            )
            hook()
            # Each expert has returned its input row.
            chosen = (ids >= 0).sum(dim=1, keepdim=True)
            assert torch.equal(combined, (x.float() * chosen * 0.5).to(x.dtype))

    under_schedules(CASE.ranks, on_each_rank, count=RUNS)


def test_two_dispatches_on_their_way() -> None:
    """On a GPU the kernels of the second are launched while those of the first wait for other ranks. Here, splitting
    the calls in two halves has the same effect."""
    from deep_ep import Buffer, Config

    def on_each_rank(group: Any) -> None:
        buffer = Buffer(group, 1 << 20, 0)
        first, second = (SglangDispatcher(buffer, trial, False, Config(**NORMAL)) for trial in TRIALS)
        for one, other in ((first, second), (second, first)):
            pending = [each.buffer._begin_dispatch(**each.dispatch_arguments()) for each in (one, other)]
            one.received(pending[0].finish())
            other.received(pending[1].finish())
            other.combine_b()
            one.combine_b()
        assert buffer.regions == 2

    under_schedules(CASE.ranks, on_each_rank, count=RUNS)


# --- DeepEP's own test of one node ----------------------------------------------------------------------------------


def test_deep_eps_own_checks() -> None:
    """Rows carry their source rank and are found by the prefix matrix of the handle; sums are within its tolerances."""
    import deep_ep
    from deep_ep.utils import calc_diff, inplace_unique, per_token_cast_back, per_token_cast_to_fp8

    def on_each_rank(group: Any) -> None:
        rank, ranks, tokens, hidden, topk, experts = group.rank(), group.size(), 24, 256, 4, 16
        random = torch.Generator().manual_seed(rank)
        x = torch.full((tokens, hidden), float(rank), dtype=torch.bfloat16)
        idx = torch.rand(tokens, experts, generator=random).topk(topk).indices.to(deep_ep.topk_idx_t)
        weights = torch.full((tokens, topk), float(rank))
        destinations = idx // (experts // ranks)
        inplace_unique(destinations, ranks)

        buffer = deep_ep.Buffer(group, int(1e6) // 128 * 128, 0, explicitly_destroy=True)
        per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, experts)
        assert per_rank.tolist() == [int((destinations == to).sum()) for to in range(ranks)] and per_node is None
        assert per_expert.tolist() == torch.bincount(idx.flatten(), minlength=experts).tolist()
        arguments = {
            "num_tokens_per_rank": per_rank,
            "is_token_in_rank": in_rank,
            "num_tokens_per_expert": per_expert,
            "topk_idx": idx,
            "topk_weights": weights,
            "config": deep_ep.Config(4, 8, 256),
            "async_finish": True,
        }
        assert deep_ep.Buffer.is_sm90_compiled(), "FP8 rows must be tried too"
        for given in (per_token_cast_to_fp8(x), x):
            recv_x, recv_idx, recv_weights, counts, handle, event = buffer.dispatch(x=given, **arguments)
            event.current_stream_wait()
            if isinstance(recv_x, tuple):
                same("cached", buffer.dispatch(x=given, handle=handle)[0][0], recv_x[0])
                recv_x = per_token_cast_back(*recv_x)
            ends = handle[0][:, rank]
            sent = group.all_gather_object(per_rank.tolist())
            assert len(recv_x) == sum(sent[source][rank] for source in range(ranks))
            start = 0
            for source, end in enumerate(ends.tolist()):
                assert (recv_x[start:end] == source).all()
                start = end
        assert counts == [int((recv_idx == expert).sum()) for expert in range(experts // ranks)]
        chosen = recv_idx >= 0
        assert torch.equal(recv_weights[chosen], recv_x[:, :topk].float()[chosen]) and not recv_weights[~chosen].any()

        worst = buffer.dispatch(x=x, num_worst_tokens=tokens * ranks, **arguments)
        worst[5].current_stream_wait()
        assert worst[3] == [] and len(worst[0]) == tokens * ranks and torch.equal(worst[0][: len(recv_x)], recv_x)
        assert (worst[1][len(recv_x) :] == -1).all()
        same("cached", buffer.dispatch(x=x, handle=handle)[0], recv_x)

        first, second = torch.randn(2, tokens, hidden, generator=random).bfloat16()
        for biases, added in ((None, 0), (first, first.float()), ((first, second), first.float() + second.float())):
            combined, combined_weights, event = buffer.combine(
                recv_x, handle, topk_weights=recv_weights, bias=biases, async_finish=True
            )
            event.current_stream_wait()
            expected = x.float() * in_rank.sum(dim=1, keepdim=True) + added
            assert calc_diff(combined.float(), expected) < 5e-6
            # Each weight of a token went to one rank and came back from it.
            assert calc_diff(combined_weights, weights) < 1e-9
        buffer.destroy()

    under_schedules(4, on_each_rank, count=RUNS)
