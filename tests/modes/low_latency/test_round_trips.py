"""Low-latency dispatch and combine against the oracle, bit by bit, over every fabric."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from builds import BLOCK_COUNTS, FABRICS, SCHEDULES, schedules
from deep_ep_py.testing import run_ranks
from low_latency import CASTS, Cast, Sizes, Work, make_buffer, round_trip

CASES = (
    Sizes("one rank", 1, (5,), 8, 16, 2, 4),
    Sizes("two ranks", 2, (7, 3), 8, 128, 3, 4),
    Sizes("four ranks, several units", 4, (70, 33, 0, 64), 70, 128, 4, 8, torch.int32),
    Sizes("several puts", 2, (300, 257), 300, 32, 2, 6),
    Sizes("few experts", 3, (9, 1, 12), 12, 384, 6, 3),
    Sizes("no tokens at all", 3, (0, 0, 0), 4, 128, 2, 6),
    Sizes("many ranks", 32, tuple(range(32)), 31, 16, 4, 64),
    Sizes("odd rows", 3, (5, 4, 3), 5, 640, 8, 24, torch.int32),
)
MIXED = (*FABRICS, "mixed")


def on_each_rank(group: Any, work: Work, fabric: str, cast: Cast) -> None:
    with make_buffer(group, work.sizes, fabric) as buffer:
        for blocks in BLOCK_COUNTS:
            buffer._engine.device.blocks = blocks
            round_trip(buffer, work, cast, hooks=blocks % 2 == 0)


@pytest.mark.parametrize("fabric", MIXED)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case(case: Sizes, fabric: str) -> None:
    work = Work.of(case)
    for seed in schedules(max(1, SCHEDULES // 2)):
        run_ranks(case.ranks, on_each_rank, work, fabric, CASTS["bf16"], seed=seed)


@pytest.mark.parametrize("fabric", MIXED)
@pytest.mark.parametrize("cast", ["fp8", "rounded", "ue8m0"])
@pytest.mark.parametrize("case", [case for case in CASES if case.hidden % 128 == 0], ids=lambda case: case.name)
def test_cast_rows(case: Sizes, cast: str, fabric: str) -> None:
    work = Work.of(case, seed=2)
    for seed in schedules(max(1, SCHEDULES // 4)):
        run_ranks(case.ranks, on_each_rank, work, fabric, CASTS[cast], seed=seed)


@pytest.mark.parametrize("fabric", MIXED)
def test_experts_that_are_named_twice(fabric: str) -> None:
    work = Work.of(Sizes("twice", 3, (40, 9, 33), 40, 64, 5, 6), twice=0.5)
    run_ranks(3, on_each_rank, work, fabric, CASTS["bf16"], seed=1)
