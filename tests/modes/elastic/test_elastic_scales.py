"""FP8 rows: scales row by row and in columns, in both layouts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import oracle
from builds import FABRICS
from cases import BY_NAME
from elastic import ElasticTrial
from harness import under_schedules

SCALES = 5
"""Per row: not a multiple of the 16 bytes at which columns begin."""


def fp8_of(x: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows of one byte per element, and scales that tell rows apart."""
    scales = torch.arange(x.shape[0] * SCALES, dtype=torch.float32).reshape(-1, SCALES) + 1000 * rank
    return x.to(torch.float8_e4m3fn), scales


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "no_host_wait"])
@pytest.mark.parametrize("columns", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("fabric", FABRICS)
def test_round_trip(fabric: str, columns: bool, exact: bool) -> None:
    trial = ElasticTrial.of(BY_NAME["several_experts_on_one_rank"], alignment=8)
    inputs = [fp8_of(x, rank) for rank, x in enumerate(trial.work.x)]
    bytes_of = [x.view(torch.uint8) for x, _ in inputs]
    want_x = oracle.dispatch(replace(trial.work, x=bytes_of))
    want_scales = oracle.dispatch(replace(trial.work, x=[scales for _, scales in inputs]))

    def on_each_rank(group: Any) -> None:
        with trial.make_buffer(group, fabric, use_fp8_dispatch=True) as buffer:
            rank = buffer.rank_idx
            x, scales, layout = want_x[rank].x, want_scales[rank].x, trial.layouts[rank]
            for expanded in (False, True):
                options = {"do_expand": expanded, "use_tma_aligned_col_major_sf": columns}
                first = buffer.dispatch(
                    inputs[rank],
                    trial.work.topk_idx[rank],
                    num_experts=trial.work.num_experts,
                    expert_alignment=trial.alignment,
                    do_cpu_sync=exact,
                    **options,
                )
                again = buffer.dispatch(inputs[rank], handle=first.handle, do_zero_padding=expanded, **options)
                for results in (first, again):
                    recv_x, recv_scales = results.recv_x
                    if columns:
                        assert recv_scales.stride(0) == 1 and recv_scales.stride(1) % 4 == 0
                    assert recv_scales.shape == (len(recv_x), SCALES)
                    rows = [row for of_expert in layout.rows for row in of_expert] if expanded else range(len(x))
                    begins = zip(layout.begins, layout.rows, strict=True)
                    places = [begin + i for begin, own in begins for i in range(len(own))] if expanded else rows
                    assert torch.equal(recv_x.view(torch.uint8)[list(places)], x[list(rows)])
                    assert torch.equal(recv_scales[list(places)], scales[list(rows)])
                if expanded:
                    assert not again.recv_x[1][layout.padding()].any()
                    assert not again.recv_x[0].view(torch.uint8)[layout.padding()].any()

    under_schedules(trial.case.ranks, on_each_rank)
