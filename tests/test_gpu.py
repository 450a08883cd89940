"""The named cases on a GPU that all ranks share, each on a stream of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cases import BY_NAME, CASES, Case
from deep_ep_py.testing import run_ranks
from harness import Trial, make_buffer, round_trip

pytestmark = [
    pytest.mark.once,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and a torch that knows of it"),
]

BLOCKS = (1, 2, 5)


def on_each_rank(group: Any, trial: Trial) -> None:
    buffer = make_buffer(group, trial.case, "peer", device="cuda")
    buffer.warmup(trial.case.hidden, trial.case.topk)
    for blocks in BLOCKS:
        round_trip(buffer, buffer.rank, trial, min(blocks, trial.case.max_blocks))
    buffer.destroy()


@pytest.mark.parametrize("case", [case for case in CASES if case.fabric in (None, "peer")], ids=lambda case: case.name)
def test_case(case: Case) -> None:
    run_ranks(case.ranks, on_each_rank, Trial.of(case).on("cuda"), device="cuda")


def test_twenty_repeats_have_the_same_bits() -> None:
    trial = Trial.of(BY_NAME["uniform"])
    for seed in range(20):
        run_ranks(trial.case.ranks, on_each_rank, trial.on("cuda"), seed=seed, device="cuda")
