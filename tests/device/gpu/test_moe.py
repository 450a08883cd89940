"""The MoE layer where only a GPU can show it: Triton's kernels compiled, and autograd on its own thread.

One rank: the backward of all ranks of a process would take turns on the one thread that autograd has per GPU.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cases import Case
from deep_ep_py import moe, ops
from deep_ep_py.device.rowwise import torch_kernels
from deep_ep_py.device.rowwise.kernels import casts_for, kernels_for
from deep_ep_py.examples.train_model import OneProcessMoE
from deep_ep_py.testing import run_ranks
from gpu_ranks import make_warm

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs triton: pip install '.[triton]'"
)

ROWS, HIDDEN, INTERMEDIATE, EXPERTS, TOPK = 37, 256, 64, 8, 3


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).cuda()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weighted", [False, True])
def test_triton_does_as_torch(dtype: torch.dtype, weighted: bool) -> None:
    triton_kernels = kernels_for(torch.device("cuda"))
    assert triton_kernels.__name__.endswith("triton_kernels")
    # Some choices are no expert here, and one row has none at all.
    topk_idx = torch.randint(-2, EXPERTS + 2, (ROWS, TOPK), generator=torch.Generator().manual_seed(1)).cuda()
    topk_idx[4] = -1
    slots, position, _ = moe.sort_by_expert(topk_idx, EXPERTS)
    weights = random(ROWS, TOPK) if weighted else None
    rows, permuted = random(ROWS, HIDDEN).to(dtype), random(len(slots), HIDDEN).to(dtype)
    for name, given in (
        ("gather_rows", (rows, slots, TOPK, weights)),
        ("sum_rows", (permuted, position, weights)),
        ("dot_rows", (rows, permuted, position)),
    ):
        ours, plain = (getattr(kernels, name)(*given) for kernels in (triton_kernels, torch_kernels))
        # Products may be fused with the additions that follow, and a dot is summed in another order.
        bits = 7 if ours.dtype == torch.bfloat16 else 17
        assert ours.dtype == plain.dtype, name
        torch.testing.assert_close(ours, plain, rtol=2.0**-bits, atol=2.0**-bits)


@pytest.mark.parametrize("round_scale", [False, True])
def test_triton_casts_as_torch(round_scale: bool) -> None:
    triton_kernels = casts_for(torch.device("cuda"))
    x = random(ROWS, HIDDEN) * torch.logspace(-8, 3, ROWS, device="cuda").unsqueeze(1)
    ours, scales = triton_kernels.cast_to_fp8(x, round_scale)
    plain, plain_scales = torch_kernels.cast_to_fp8(x, round_scale)
    torch.testing.assert_close(scales, plain_scales, rtol=2.0**-22, atol=0.0)
    torch.testing.assert_close(ours.float(), plain.float(), rtol=2.0**-3, atol=2.0**-9)
    assert (ours.float() != plain.float()).float().mean() < 0.01
    back = [kernels.cast_back(plain, plain_scales, torch.float32) for kernels in (triton_kernels, torch_kernels)]
    assert torch.equal(*back)


def results(layer: nn.Module, x: Tensor, grad: Tensor) -> dict[str, Tensor]:
    """Return the output, and the gradients of the rows and of each weight, on the CPU."""
    x = x.clone().requires_grad_()
    out = layer(x)
    out.backward(grad)
    gradients = [weight.grad for weight in layer.parameters()]
    found = {"out": out.detach(), "x": x.grad, **{f"weight {i}": value for i, value in enumerate(gradients)}}
    return {name: value.float().cpu() for name, value in found.items() if value is not None}


@pytest.mark.parametrize("worst", [0, ROWS + 5], ids=["counted", "worst"])
def test_a_layer_and_its_backward(worst: int) -> None:
    case = Case("layer", 1, ROWS, hidden=HIDDEN, topk=TOPK, experts=EXPERTS)
    x, grad = random(ROWS, HIDDEN), random(ROWS + 1, HIDDEN)[1:].contiguous()

    def experts() -> moe.Experts:
        return moe.Experts(0, EXPERTS, HIDDEN, INTERMEDIATE, seed=3)

    def gate() -> moe.Gate:
        torch.manual_seed(5)
        return moe.Gate(HIDDEN, EXPERTS, TOPK)

    alone = results(OneProcessMoE(gate(), [experts()]), x.cpu(), grad.cpu())

    def on_each_rank(group: Any) -> None:
        buffer = make_warm(group, case)
        layer = moe.MoELayer(gate(), experts(), EXPERTS, ops.register(buffer), worst).cuda()
        for _ in range(3):
            layer.zero_grad()
            ours = results(layer, x, grad)
            assert len(ours) == len(alone) == 5
            for name, wanted in alone.items():
                # Rows are rounded to BF16 on the way, from values that other matrix products have made.
                scale = wanted.abs().max()
                assert (ours[name] - wanted).abs().max() <= 0.02 * scale, name
        buffer.destroy()

    run_ranks(1, on_each_rank, device="cuda")
