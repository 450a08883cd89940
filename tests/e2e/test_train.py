"""The training example: a short end-to-end run, and the parts of its check."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from builds import BUILD
from deep_ep_py.examples.text import read_repository
from deep_ep_py.examples.train_model import Batches, ByteModel, OneProcessMoE, TrainConfig
from deep_ep_py.examples.train_moe import main
from deep_ep_py.examples.train_report import verdict
from places import python_path

pytestmark = pytest.mark.once

SIZES = {"ranks": 2, "steps": 3, "batch": 2, "length": 8, "hidden": 16, "layers": 1, "heads": 2, "experts": 4}
SMALL = TrainConfig(**SIZES, topk=2, intermediate=8, rate=0.01, seed=0)


def test_ranks_have_parts_of_one_batch() -> None:
    batches = Batches(bytes(range(200)), SMALL)
    parts = [batches.of_step(5, rank) for rank in range(2)]
    assert parts[0].shape == (2, 9) and torch.equal(torch.cat(parts), batches.of_step(5))
    assert (parts[1].diff(dim=1) == 1).all(), "bytes must be in text order"
    assert not torch.equal(batches.of_step(6), batches.of_step(5))
    with pytest.raises(ValueError, match="text of 9 bytes"):
        Batches(bytes(9), SMALL)


def test_the_text_is_the_repository() -> None:
    text, origin = read_repository()
    assert b"GPU-initiated" in text and b"def read_repository" in text and ".py files" in origin


def test_no_byte_is_seen_before_it_is_predicted() -> None:
    model = ByteModel(SMALL, lambda layer, gate: OneProcessMoE(gate, [SMALL.make_experts(layer, r) for r in range(2)]))
    embedded: list[torch.Tensor] = []
    states: list[torch.Tensor] = []
    model.bytes.register_forward_hook(lambda *call: embedded.append(call[-1]))
    model.blocks.register_forward_hook(lambda *call: states.append(call[-1]))
    model(torch.arange(9).unsqueeze(0))
    (gradient,) = torch.autograd.grad(states[0][0, 3].sum(), embedded[0])
    assert gradient[0, :4].any() and not gradient[0, 4:].any()


@pytest.mark.parametrize(
    ("losses", "reference", "passed"),
    [
        ([2.0, 1.0], [2.0, 1.0009], True),
        ([2.0, 1.0], [2.0, 1.002], False),
        ([2.0, 1.0], [2.0, float("nan")], False),
        ([1.0, 2.0], [1.0, 2.0], False),
        ([2.0, 1.0], None, True),
    ],
)
def test_the_verdict(losses: list[float], reference: list[float] | None, passed: bool) -> None:
    figures = {"losses": losses, **({} if reference is None else {"reference": reference})}
    assert verdict(figures).passed is passed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--experts=6"], "--experts is 6"),
        (["--hidden=20"], "--hidden is 20"),
        (["--hidden=24", "--heads=5"], "--hidden is 24"),
        (["--experts=4", "--topk=5"], "--topk is 5"),
    ],
)
def test_options_that_do_not_fit(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2 and message in result.output


@pytest.mark.thorough
def test_a_short_training_under_torchrun(tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    sizes = ["--steps=60", "--batch=2", "--length=32", "--hidden=32", "--experts=8", "--intermediate=32"]
    done = subprocess.run(
        [*launcher, "-m", "deep_ep_py.examples.train_moe", *sizes, "--plot=train.png"],
        env={**os.environ, "DEEP_EP_BUILD": BUILD, "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = " ".join(done.stdout.split())
    assert said.count("correct: the loss falls") == 1, "rank 0 alone prints\n" + done.stdout
    assert "equals that of one process in each of 60 steps" in said
    assert (tmp_path / "train.png").read_bytes().startswith(b"\x89PNG")
