"""The parts of a layer: permutation and grouped GEMMs with their gradients, FP8 casts, Triton kernels."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from deep_ep_py import moe
from deep_ep_py.device.rowwise import torch_kernels
from deep_ep_py.device.rowwise.kernels import kernels_for
from deep_ep_py.moe import grouped

pytestmark = pytest.mark.once

ROWS, HIDDEN, TOPK, EXPERTS = 13, 256, 3, 5


def test_without_the_interpreter_a_cpu_takes_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert kernels_for(torch.device("cpu")) is torch_kernels
    if importlib.util.find_spec("triton") is None:
        assert kernels_for(torch.device("cuda")) is torch_kernels


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def ids() -> Tensor:
    """Return ids of which some are of no local expert, with one row of no expert at all."""
    topk_idx = torch.randint(-2, EXPERTS + 2, (ROWS, TOPK), generator=torch.Generator().manual_seed(1))
    topk_idx[4] = -1
    return topk_idx


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton: pip install '.[triton]'")
def test_triton_does_as_torch(workers: Path) -> None:
    """In a separate process, because Triton chooses its interpreter when it is first imported."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, str(workers / "triton_kernels.py")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_sorted_by_expert(dtype: torch.dtype) -> None:
    topk_idx = ids().to(dtype)
    slots, position, ends = moe.sort_by_expert(topk_idx, EXPERTS)
    expected = [
        row * TOPK + choice
        for expert in range(EXPERTS)
        for row in range(ROWS)
        for choice in range(TOPK)
        if topk_idx[row, choice] == expert
    ]
    assert slots.tolist() == expected
    assert ends.tolist() == [int(((topk_idx >= 0) & (topk_idx <= expert)).sum()) for expert in range(EXPERTS)]
    assert torch.equal(position.flatten()[slots], torch.arange(len(expected)))
    assert slots.dtype == position.dtype == ends.dtype == torch.int64
    assert int((position >= 0).sum()) == len(expected)


def test_permute_and_unpermute_have_the_gradients_of_plain_torch() -> None:
    topk_idx = ids()
    permutation = moe.sort_by_expert(topk_idx, EXPERTS)
    given = [random(ROWS, 8), random(ROWS, TOPK)]
    x, weights = (tensor.clone().requires_grad_() for tensor in given)
    rows = moe.permute(x, permutation)
    out = moe.unpermute(rows * rows, weights, permutation)
    out.sin().sum().backward()

    plain_x, plain_weights = (tensor.clone().requires_grad_() for tensor in given)
    local = ((topk_idx >= 0) & (topk_idx < EXPERTS)).float()
    plain = plain_x * plain_x * (plain_weights * local).sum(dim=1, keepdim=True)
    plain.sin().sum().backward()
    for got, wanted in ((out, plain), (x.grad, plain_x.grad), (weights.grad, plain_weights.grad)):
        torch.testing.assert_close(got, wanted)
    assert not out[4].any(), "expected zeros in a row without a local expert"


@pytest.mark.parametrize("single_launch", [False, True])
def test_grouped_linear_has_the_gradients_of_plain_torch(single_launch: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """`single_launch` takes the calls that a GPU would take, which torch has for a CPU too."""
    monkeypatch.setattr(grouped, "_without_host_wait", lambda *_: single_launch)
    ends = torch.tensor([2, 2, 7, 9])
    given = [random(9, 16), random(4, 8, 16)]
    x, weight = (tensor.clone().requires_grad_() for tensor in given)
    out = moe.grouped_linear(x, weight, ends)
    out.sin().sum().backward()
    plain_x, plain_weight = (tensor.clone().requires_grad_() for tensor in given)
    parts = zip([0, 2, 2, 7], ends.tolist(), plain_weight)
    plain = torch.cat([plain_x[begin:end] @ matrix.t() for begin, end, matrix in parts])
    plain.sin().sum().backward()
    for got, wanted in ((out, plain), (x.grad, plain_x.grad), (weight.grad, plain_weight.grad)):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize(
    ("rows", "sizes", "capability", "expected"),
    [
        (torch.zeros(3, 8, dtype=torch.bfloat16), (8, 16), 9, True),
        (torch.zeros(3, 8, dtype=torch.bfloat16), (8, 16), 10, True),
        (torch.zeros(3, 8, dtype=torch.bfloat16), (8, 16), 8, False),
        (torch.zeros(3, 8, dtype=torch.bfloat16), (8, 12), 9, False),
        (torch.zeros(0, 8, dtype=torch.bfloat16), (8, 16), 9, False),
        (torch.zeros(3, 8), (8, 16), 9, False),
    ],
)
def test_when_torch_multiplies_groups_without_a_host_wait(
    rows: Tensor, sizes: tuple[int, int], capability: int, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (capability, 0))
    on_a_gpu = SimpleNamespace(is_cuda=True, dtype=rows.dtype, shape=rows.shape, device="cuda")
    assert grouped._without_host_wait(on_a_gpu, *sizes) == expected
    assert not grouped._without_host_wait(rows, *sizes), "on a CPU"


def test_what_torch_checks_of_ops() -> None:
    op = torch.ops.deep_ep
    slots, position, ends = moe.sort_by_expert(ids(), EXPERTS)
    rows, weights = random(len(slots), 8).requires_grad_(), random(ROWS, TOPK).requires_grad_()
    torch.library.opcheck(op.sort_by_expert.default, (ids(), EXPERTS))
    torch.library.opcheck(op.permute.default, (random(ROWS, 8).requires_grad_(), slots, position))
    torch.library.opcheck(op.unpermute.default, (rows, weights, slots, position))
    torch.library.opcheck(op.grouped_linear.default, (rows, random(EXPERTS, 4, 8).requires_grad_(), ends))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_and_back(dtype: torch.dtype) -> None:
    x = (random(ROWS, 512) * torch.logspace(-2, 3, ROWS).unsqueeze(1)).to(dtype)
    x[3] = 0
    rows, scales = moe.per_token_cast_to_fp8(x[:0])
    assert moe.per_token_cast_back(rows, scales).shape == (0, 512), "a rank may have received nothing"
    for round_scale in (False, True):
        rows, scales = moe.per_token_cast_to_fp8(x, round_scale)
        assert rows.dtype == torch.float8_e4m3fn and scales.shape == (ROWS, 4)
        back = moe.per_token_cast_back(rows, scales, torch.float32)
        # Half an ulp of a 3-bit mantissa; below the smallest normal number, half its spacing times the scale.
        bound = torch.maximum(x.float().abs() * 2.0**-4, scales.repeat_interleave(128, 1) * 2.0**-10)
        assert ((back - x.float()).abs() <= bound * 1.001).all()
        assert round_scale or rows.float().abs().amax(dim=1).sub(448).abs().max() == 448, "all but the zero row"


def test_packed_exponents() -> None:
    x = random(ROWS, 1024).bfloat16()
    rows, scales = moe.per_token_cast_to_fp8(x, round_scale=True)
    same_rows, packed = moe.per_token_cast_to_fp8(x, round_scale=True, use_ue8m0=True)
    assert torch.equal(rows.view(torch.uint8), same_rows.view(torch.uint8))
    assert packed.dtype == torch.int32 and packed.shape == (ROWS, 2)
    assert int(packed[2, 1]) & 0xFF == int(scales[2, 4].log2()) + 127, "the first exponent must be in the lowest byte"
    column_major = packed.t().contiguous().t()
    assert torch.equal(moe.per_token_cast_back(rows, column_major), moe.per_token_cast_back(rows, scales))
    one_word = packed[:1, :1].as_strided((1, 1), (1, 12))
    narrow = rows[:1, :512].contiguous()
    assert torch.equal(moe.per_token_cast_back(narrow, one_word), moe.per_token_cast_back(narrow, scales[:1, :4]))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: moe.per_token_cast_to_fp8(torch.zeros(2, 128, dtype=torch.int32)), TypeError, "x=torch.int32"),
        (lambda: moe.per_token_cast_to_fp8(torch.zeros(2, 100)), ValueError, r"x=\[2, 100\].*multiple of 128"),
        (lambda: moe.per_token_cast_to_fp8(torch.zeros(128, 2).t()), ValueError, "not contiguous"),
        (lambda: moe.per_token_cast_to_fp8(torch.zeros(2, 128), True, True), ValueError, "multiple of 512"),
        (lambda: moe.per_token_cast_to_fp8(torch.zeros(2, 512), use_ue8m0=True), ValueError, "round_scale=True"),
        (lambda: moe.per_token_cast_back(torch.zeros(2, 128), torch.zeros(2, 1)), TypeError, "x=torch.float32"),
        (
            lambda: moe.per_token_cast_back(torch.zeros(2, 256).to(torch.float8_e4m3fn), torch.zeros(2, 1)),
            ValueError,
            r"scales=\[2, 1\]",
        ),
        (lambda: moe.Gate(8, 4, 5), ValueError, "topk=5"),
    ],
)
def test_wrong_arguments(call: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()  # type: ignore[operator]
