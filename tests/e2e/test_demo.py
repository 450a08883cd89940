"""The demo: its layer, its check, and a small end-to-end run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from builds import BUILD
from deep_ep_py.examples.demo_check import compare, reference
from deep_ep_py.examples.moe_layer import Gate
from deep_ep_py.examples.text import embed_bytes, read_text
from deep_ep_py.moe import Experts
from forks import run_python
from places import python_path

pytestmark = pytest.mark.once


def test_the_gate_is_group_limited_and_normalised() -> None:
    gate = Gate(hidden=32, experts=64, topk=8)
    topk_idx, weights = gate(torch.randn(100, 32, generator=torch.Generator().manual_seed(0)).bfloat16())
    assert max(len(set(row)) for row in (topk_idx // 8).tolist()) <= 4
    assert all(len(set(row)) == 8 for row in topk_idx.tolist())
    torch.testing.assert_close(weights.sum(dim=1), torch.full((100,), 2.5))
    assert (weights > 0).all()


def test_experts_are_the_same_wherever_they_are_held() -> None:
    x = torch.randn(10, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    topk_idx, weights = torch.tensor([[3, 5]] * 10), torch.tensor([[0.25, 0.75]] * 10)
    everything = Experts(0, 8, 16, 4)(x, topk_idx, weights)
    halves = [Experts(first, 4, 16, 4)(x, topk_idx - first, weights) for first in (0, 4)]
    torch.testing.assert_close(halves[0] + halves[1], everything)


def test_tokens_are_the_text() -> None:
    text, origin = read_text()
    assert origin and len(text) > 100
    x = embed_bytes(b"abcabcabc", rank=0, tokens=9, hidden=16)
    assert x.dtype == torch.bfloat16
    assert torch.equal(x[3], x[6]), "the same letter follows the same letters"
    assert not torch.equal(x[3], x[4])
    assert torch.equal(embed_bytes(b"abcabcabc", 1, 4, 16), x[4:8]), "ranks take adjacent parts"
    torch.testing.assert_close(x.float().square().mean(dim=1), torch.ones(9), rtol=0.02, atol=0)


def test_the_check_sees_one_wrong_element_and_nan() -> None:
    gate = Gate(hidden=32, experts=16, topk=2)
    tokens = [embed_bytes(b"some text", rank, 20, 32) for rank in range(2)]
    exact, magnitude = reference(tokens, gate, num_experts=16, intermediate=8, seed=0)
    good = exact.to(torch.bfloat16)
    check = compare(good, exact, magnitude)
    assert check.passed and check.calc_diff < 1e-5 and check.max_abs_error > 0
    for value in (float(good[7, 3]) + 0.1, float("nan")):
        wrong = good.clone()
        wrong[7, 3] = value
        assert not compare(wrong, exact, magnitude).passed


@pytest.mark.thorough
def test_a_small_demo_runs(tmp_path: Path) -> None:
    arguments = ["--ranks=2", "--tokens=32", "--hidden=64", "--intermediate=16", "--experts=16", "--steps=2"]
    environment = {**os.environ, "DEEP_EP_BUILD": BUILD, "PYTHONPATH": python_path()}
    command = ["-m", "deep_ep_py.examples.moe_demo", *arguments, "--plot=demo.png"]
    done = run_python(command, environment, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    said = " ".join(done.stdout.split())
    assert "correct: the output on 2 ranks equals that of the same layer in one process" in said
    for phase in ("layout", "dispatch", "experts", "combine"):
        assert phase in done.stdout
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
