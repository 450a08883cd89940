"""The calls of a Buffer inside of a function that `torch.compile` compiles: the graph breaks around each, and nothing
of the library is compiled. What they return passes through graphs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import deep_ep_py as deep_ep
from deep_ep_py.testing import run_ranks

pytestmark = pytest.mark.once
HIDDEN, TOPK, EXPERTS, TOKENS = 64, 2, 4, 5
Step = Callable[[Tensor, Tensor, Tensor], Tensor]


class Calls:
    """Functions to compile, on Buffers of one rank; each makes its calls between two pieces of a graph."""

    def __init__(self, group: Any) -> None:
        size = deep_ep.Buffer.get_low_latency_rdma_size_hint(8, HIDDEN, 1, EXPERTS)
        self.buffer = deep_ep.Buffer(group, 1 << 20, size, low_latency_mode=True)
        self.elastic = deep_ep.ElasticBuffer(group, num_max_tokens_per_rank=8, hidden=HIDDEN, num_topk=TOPK)
        x, topk_idx, weights = inputs(TOKENS)
        self.kept = self._dispatch(x, topk_idx, weights)

    def _dispatch(self, x: Tensor, topk_idx: Tensor, weights: Tensor, **options: Any) -> Any:
        per_rank, _, per_expert, in_rank, _ = self.buffer.get_dispatch_layout(topk_idx, EXPERTS)
        layout = {"num_tokens_per_rank": per_rank, "is_token_in_rank": in_rank, "num_tokens_per_expert": per_expert}
        return self.buffer.dispatch(x, topk_idx=topk_idx, topk_weights=weights, **layout, **options)

    def layout(self, x: Tensor, topk_idx: Tensor, weights: Tensor) -> Tensor:
        return self.buffer.get_dispatch_layout(topk_idx + 0, EXPERTS)[3].float() + 1

    def cached(self, x: Tensor, topk_idx: Tensor, weights: Tensor) -> Tensor:
        return self.buffer.dispatch(x * 2, handle=self.kept.handle)[0] + 1

    def combine(self, x: Tensor, topk_idx: Tensor, weights: Tensor) -> Tensor:
        return self.buffer.combine(x * 2, self.kept.handle).combined_x + 1

    def reading(self, x: Tensor, topk_idx: Tensor, weights: Tensor) -> Tensor:
        handle = self._dispatch(x * 2, topk_idx, weights).handle
        prefix, *_, send_head = handle
        return handle[3] * 2 + prefix[0, 0] + send_head.sum() + len(handle)

    def rebuilt(self, x: Tensor, topk_idx: Tensor, weights: Tensor) -> Tensor:
        received = self._dispatch(x * 2, topk_idx, weights)
        again = self.buffer.dispatch(received.recv_x * 2, handle=tuple(received.handle))[0]
        return self.buffer.combine(again * 2, [*received.handle]).combined_x + 1

    def events(self, x: Tensor, topk_idx: Tensor, weights: Tensor) -> Tensor:
        received = self._dispatch(x * 2, topk_idx, weights, async_finish=True)
        with received.event:
            y = x * 3
        combined_x, _, event = self.buffer.combine(
            received.recv_x * 2, received.handle, previous_event=self.buffer.capture(), async_finish=True
        )
        event.current_stream_wait()
        return combined_x + y

    def low_latency(self, x: Tensor, topk_idx: Tensor, weights: Tensor) -> Tensor:
        options = {"use_fp8": False, "return_recv_hook": True}
        packed, _, handle, _, hook = self.buffer.low_latency_dispatch(x * 2, topk_idx, 8, EXPERTS, **options)
        assert hook is not None
        hook()
        out, _, hook = self.buffer.low_latency_combine(packed, topk_idx, weights, handle, return_recv_hook=True)
        assert hook is not None
        hook()
        return out + 1

    def expanded(self, x: Tensor, topk_idx: Tensor, weights: Tensor) -> Tensor:
        received = self.elastic.dispatch(x * 2, topk_idx=topk_idx, num_experts=EXPERTS, do_expand=True)
        return self.elastic.combine(received.recv_x * 2, received.handle)[0] + 1

    def elastic_again(self, x: Tensor, topk_idx: Tensor, weights: Tensor) -> Tensor:
        first = self.elastic.dispatch(x * 2, topk_idx=topk_idx, num_experts=EXPERTS)
        again = self.elastic.dispatch(first.recv_x * 2, handle=first.handle)
        return self.elastic.combine(again.recv_x * 2, again.handle)[0] + 1


def inputs(tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    topk_weights, topk_idx = torch.rand(tokens, EXPERTS).topk(TOPK)
    return torch.randn(tokens, HIDDEN).bfloat16(), topk_idx, topk_weights


NAMES = ("layout", "cached", "combine", "reading", "rebuilt", "events", "low_latency", "expanded", "elastic_again")


@pytest.mark.parametrize(
    "name", [name if name == "combine" else pytest.param(name, marks=pytest.mark.thorough) for name in NAMES]
)
def test_in_a_compiled_function(name: str) -> None:
    code: set[str] = set()

    def backend(graph: torch.fx.GraphModule, example: Any) -> Callable[..., Any]:
        code.update(trace for node in graph.graph.nodes if (trace := node.stack_trace))
        return graph.forward

    def on_each_rank(group: Any) -> None:
        calls = Calls(group)
        step: Step = getattr(calls, name)
        torch._dynamo.reset()
        compiled = torch.compile(step, backend=backend)
        for tokens in (TOKENS, TOKENS, *(() if name in ("cached", "combine") else (3, 8))):
            given = inputs(tokens)
            assert torch.equal(compiled(*given), step(*given))
        assert code, "nothing has been compiled"
        library = [trace for trace in code if str(Path(deep_ep.__file__).parent) in trace]
        assert not library, library[0]
        calls.buffer.destroy()
        calls.elastic.destroy()

    run_ranks(1, on_each_rank)
