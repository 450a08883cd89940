"""Runs under torchrun: a MoE layer compiled as a single graph matches eager mode, forward and backward."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

import deep_ep_py as deep_ep
from deep_ep_py import moe, ops

HIDDEN, EXPERTS, TOPK = 32, 4, 2


def forward_and_backward(layer: Callable[[Tensor], Tensor], weights: list[Tensor], x: Tensor) -> list[Tensor]:
    """Return the output and all gradients."""
    for weight in weights:
        weight.grad = None
    leaf = x.clone().requires_grad_()
    out = layer(leaf)
    out.square().sum().backward()
    return [out.detach(), leaf.grad, *(weight.grad for weight in weights)]


def check(layer: nn.Module, backend: str, rank: int) -> None:
    """Compile the layer and compare for two sizes, which must not cause a second compilation."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=backend)
    weights = list(layer.parameters())
    for tokens in (21, 34):
        x = torch.randn(tokens + rank, HIDDEN, generator=torch.Generator().manual_seed(rank))
        eager, fast = (forward_and_backward(call, weights, x) for call in (layer, compiled))
        assert eager[0].any() and all(gradient.any() for gradient in eager[1:])
        for mine, theirs in zip(fast, eager):
            if backend == "aot_eager":
                assert torch.equal(mine, theirs), "the same kernels"
            # A compiler's float32 may differ in the last bit, and flip the rounding of a BF16 element.
            torch.testing.assert_close(mine, theirs, rtol=2**-7, atol=2**-7)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("backend")
    backend = parser.parse_args().backend

    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    experts = moe.Experts(rank * EXPERTS // ranks, EXPERTS // ranks, HIDDEN, 16)
    gate = moe.Gate(HIDDEN, EXPERTS, TOPK)
    with deep_ep.Buffer(dist.group.WORLD, num_nvl_bytes=1 << 20) as buffer:
        # One suffices for a slow compiler: unknown sizes are the harder case.
        for worst in (0, 80) if backend == "aot_eager" else (0,):
            check(moe.MoELayer(gate, experts, EXPERTS, ops.register(buffer), worst), backend, rank)
        check(moe.ExpandedMoELayer(gate, experts, EXPERTS, ops.register(buffer), 8), backend, rank)
    print(f"rank {rank} is done")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
