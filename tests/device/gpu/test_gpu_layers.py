"""Layers on a GPU beyond `MoELayer` in eager mode: `ExpandedMoELayer`, `DecodeLayer`, and layers that torch compiles.

Layers with a backward run on one rank: those of all ranks of a process would take turns on the one thread that autograd
has per GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cases import Case
from decode import check_close, dense, make_layer, routed
from deep_ep_py import moe, ops
from deep_ep_py.examples.train_model import OneProcessMoE
from deep_ep_py.testing import run_ranks
from gpu_ranks import make_warm
from low_latency import BF16, CASTS, Cast, Sizes, Work
from low_latency_gpu import warm_buffer

ROWS, HIDDEN, INTERMEDIATE, EXPERTS, TOPK = 37, 256, 64, 8, 3
CASE = Case("layer", 1, ROWS, hidden=HIDDEN, topk=TOPK, experts=EXPERTS)
DECODING = Sizes("decoding", 2, (7, 10), 16, 128, 3, 8)


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def experts() -> moe.Experts:
    return moe.Experts(0, EXPERTS, HIDDEN, INTERMEDIATE, seed=3)


def gate() -> moe.Gate:
    torch.manual_seed(5)
    return moe.Gate(HIDDEN, EXPERTS, TOPK)


def results(call: Callable[[Tensor], Tensor], layer: nn.Module, x: Tensor, grad: Tensor) -> list[Tensor]:
    """Return the output, and the gradients of the rows and of each weight, on the CPU."""
    layer.zero_grad()
    x = x.clone().requires_grad_()
    out = call(x)
    out.backward(grad)
    found = [out.detach(), x.grad, *(weight.grad for weight in layer.parameters())]
    torch.cuda.current_stream().synchronize()
    return [value.float().cpu() for value in found if value is not None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_expanded_layer_and_its_backward(dtype: torch.dtype) -> None:
    x, grad = random(ROWS, HIDDEN), random(ROWS + 1, HIDDEN)[1:].contiguous()
    reference = OneProcessMoE(gate(), [experts()])
    alone = results(reference, reference, x, grad)

    def on_each_rank(group: Any) -> None:
        buffer = make_warm(group, CASE)
        layer = moe.ExpandedMoELayer(gate(), experts().to(dtype), EXPERTS, ops.register(buffer), 8).to(buffer.device)
        for _ in range(2):
            ours = results(layer, layer, x.to(buffer.device), grad.to(buffer.device))
            assert len(ours) == len(alone) == 5
            for number, (mine, wanted) in enumerate(zip(ours, alone)):
                # Rows are rounded to BF16 on the way, and so are the weights and all products if the experts are BF16.
                assert (mine - wanted).abs().max() <= (0.02 if dtype == torch.float32 else 0.06) * wanted.abs().max(), (
                    number
                )
        buffer.destroy()

    run_ranks(1, on_each_rank, device="cuda")


@pytest.mark.parametrize(("cast", "zero_copy"), [(BF16, False), (BF16, True), (CASTS["fp8"], True)])
def test_a_decode_layer(cast: Cast, zero_copy: bool) -> None:
    both = [Work.of(DECODING, seed, results=False) for seed in (1, 2)]

    def on_each_rank(group: Any) -> None:
        with warm_buffer(group, DECODING) as buffer, torch.no_grad():
            layer = make_layer(buffer, DECODING, cast, zero_copy).to(buffer.device)
            for work in both:
                out = layer(*(value.to(buffer.device) for value in routed(work, buffer.rank)))
                torch.cuda.current_stream().synchronize()
                check_close(out.cpu(), *dense(work, buffer.rank, cast), 0.0079)

    run_ranks(DECODING.ranks, on_each_rank, device="cuda")


@pytest.mark.parametrize("expanded", [False, True])
def test_a_compiled_layer(expanded: bool) -> None:
    """One graph for two numbers of tokens, with the kernels of eager mode: the same bits."""
    torch._dynamo.reset()

    def on_each_rank(group: Any) -> None:
        buffer = make_warm(group, CASE)
        name = ops.register(buffer)
        if expanded:
            layer: nn.Module = moe.ExpandedMoELayer(gate(), experts(), EXPERTS, name, 8)
        else:
            layer = moe.MoELayer(gate(), experts(), EXPERTS, name)
        layer = layer.to(buffer.device)
        compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
        for rows in (ROWS, ROWS // 2):
            x, grad = random(rows, HIDDEN).to(buffer.device), random(rows, HIDDEN).to(buffer.device)
            eager, fast = (results(call, layer, x, grad) for call in (layer, compiled))
            assert eager[0].any()
            for mine, wanted in zip(fast, eager, strict=True):
                torch.testing.assert_close(mine, wanted, rtol=2**-7, atol=2**-7)
        buffer.destroy()

    run_ranks(1, on_each_rank, device="cuda")
