"""Runs with TRITON_INTERPRET=1: the layer's Triton kernels match their torch counterparts."""

from __future__ import annotations

import torch
from torch import Tensor

from deep_ep_py import moe
from deep_ep_py.device.rowwise import torch_kernels
from deep_ep_py.device.rowwise.kernels import kernels_for

ROWS, TOPK, EXPERTS = 13, 3, 5


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def last_place(values: Tensor, bits: int, smallest: float) -> Tensor:
    """Return the distance between adjacent numbers of a format with so many mantissa bits, at the given values."""
    return torch.maximum(values.abs(), torch.tensor(smallest)).log2().floor().exp2() * 2.0**-bits


def check_rows(topk_idx: Tensor, hidden: int, weights: Tensor | None) -> None:
    slots, position, _ = moe.sort_by_expert(topk_idx, EXPERTS)
    rows, permuted = random(ROWS, hidden), random(len(slots), hidden)
    for name, given in (("gather_rows", (rows, slots, TOPK, weights)), ("sum_rows", (permuted, position, weights))):
        in_triton, in_torch = getattr(triton_kernels, name), getattr(torch_kernels, name)
        assert torch.equal(in_triton(*given), in_torch(*given)), name
        # The interpreter truncates where a GPU rounds: one unit in the last place of BF16.
        narrow = in_triton(given[0].bfloat16(), *given[1:]).float()
        exact = in_torch(given[0].bfloat16().float(), *given[1:])
        assert ((narrow - exact).abs() <= last_place(exact, 7, 1e-30)).all(), name
    dots = [kernels.dot_rows(rows, permuted, position) for kernels in (triton_kernels, torch_kernels)]
    torch.testing.assert_close(*dots, rtol=1e-5, atol=1e-4)


def check_casts(round_scale: bool) -> None:
    x = random(ROWS, 256) * torch.logspace(-8, 3, ROWS).unsqueeze(1)
    ours, scales = triton_kernels.cast_to_fp8(x, round_scale)
    plain, plain_scales = torch_kernels.cast_to_fp8(x, round_scale)
    assert torch.equal(scales, plain_scales)
    # As above: one unit in the last place of e4m3; below 2^-6 its numbers are equally spaced. If rounding up gives a
    # power of two, the interpreter fails to raise the exponent; those are excluded.
    expected = plain.float()
    close = (ours.float() - expected).abs() <= last_place(expected, 3, 2.0**-6)
    power_of_two = torch.frexp(expected).mantissa.abs() == 0.5
    assert (close | power_of_two).all() and power_of_two.float().mean() < 0.25
    back = [kernels.cast_back(plain, scales, torch.float32) for kernels in (triton_kernels, torch_kernels)]
    assert torch.equal(*back)


def check_nothing_to_do() -> None:
    nothing = torch.zeros(0, 128)
    slots, position, _ = moe.sort_by_expert(torch.zeros(0, 2, dtype=torch.int64), 3)
    assert triton_kernels.gather_rows(nothing, slots, 2, None).shape == (0, 128)
    assert triton_kernels.sum_rows(nothing, position, None).shape == (0, 128)
    assert triton_kernels.dot_rows(nothing, nothing, position).shape == (0, 2)
    rows, scales = triton_kernels.cast_to_fp8(nothing, False)
    assert triton_kernels.cast_back(rows, scales, torch.bfloat16).shape == (0, 128)


def main() -> None:
    # Some choices are no expert here, and one row has none at all.
    topk_idx = torch.randint(-2, EXPERTS + 2, (ROWS, TOPK), generator=torch.Generator().manual_seed(1))
    topk_idx[4] = -1
    for hidden in (8, 1096):
        for weights in (None, random(ROWS, TOPK)):
            check_rows(topk_idx, hidden, weights)
    for round_scale in (False, True):
        check_casts(round_scale)
    check_nothing_to_do()


triton_kernels = kernels_for(torch.device("cpu"))
assert triton_kernels.__name__.endswith("triton_kernels"), triton_kernels

if __name__ == "__main__":
    main()
