"""FP8 rows with their scales, and 32-bit expert ids, are moved unchanged, whatever their strides."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

import deep_ep_py as deep_ep
from builds import FABRICS
from cases import BY_NAME
from deep_ep_py.modes.normal.layout import launch_layout
from deep_ep_py.testing import run_ranks
from fp8 import KINDS, Fp8Trial
from harness import make_buffer, under_schedules

CASES = ("uniform", "uneven_tokens", "ranks_that_send_nothing", "rounds_of_few_rows", "no_tokens_at_all")


@pytest.mark.parametrize("fabric", FABRICS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.covers
def test_round_trip(name: str, kind: str, fabric: str) -> None:
    # Chunks of FP8 rows with scales are slightly longer than those of the case.
    case = replace(BY_NAME[name], num_nvl_bytes=BY_NAME[name].num_nvl_bytes * 2)
    trial = Fp8Trial.of(case, kind, (torch.int32, torch.int64)[KINDS.index(kind) % 2])

    def on_each_rank(group: Any) -> None:
        trial.round_trip(make_buffer(group, case, fabric))

    under_schedules(case.ranks, on_each_rank, count=3)


@pytest.mark.parametrize("fabric", FABRICS)
def test_worst_tokens(fabric: str) -> None:
    case = BY_NAME["uniform"]
    trial = Fp8Trial.of(case, "one_per_row", torch.int32)
    rows = trial.trial.max_rows + 3

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, case, fabric)
        used = len(trial.trial.received[buffer.rank].x)
        (x, scales), idx, weights, *_ = buffer.dispatch(**trial.arguments(buffer.rank, num_worst_tokens=rows))
        trial.check_rows(buffer.rank, (x[:used], scales[:used]))
        assert len(x) == len(scales) == rows and idx.dtype == torch.int32
        assert (idx[used:] == -1).all() and not weights[used:].any()

    under_schedules(case.ranks, on_each_rank, count=3)


def test_ranks_that_differ_in_types_are_told() -> None:
    """Rows and scales of equal sizes but different types are never mixed silently."""
    case = BY_NAME["two_ranks"]
    trial = Fp8Trial.of(case, "rows", torch.int64)

    def on_each_rank(group: Any) -> str:
        buffer = make_buffer(group, case, "peer")
        arguments = trial.arguments(buffer.rank)
        if buffer.rank == 1:
            arguments["x"] = (arguments["x"][0], arguments["x"][1].view(torch.int32))
        with pytest.raises(deep_ep.DeepEPError, match="does not match") as info:
            buffer.dispatch(**arguments)
        return str(info.value)

    # A rank that is told by the other one before it has checked itself reports that.
    said = run_ranks(2, on_each_rank, seed=1)
    types = r"type of x \(.*float8_e4m3fn with float32 scales.*float8_e4m3fn with int32 scales"
    assert any(re.search(f"does not match.*{types}", one) for one in said), said


def test_ids_that_no_check_of_the_host_saw() -> None:
    """On a GPU the host does not read ids: the layout treats an invalid one as no choice, and the next call raises."""
    case = BY_NAME["two_ranks"]

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, case, "peer")
        ids = torch.tensor([[0, case.experts], [-7, 1]])
        counts = [torch.zeros(2, dtype=torch.int32), torch.zeros(case.experts, dtype=torch.int32)]
        in_rank = torch.empty(2, 2, dtype=torch.bool)
        launch_layout(buffer._engine, ids, case.experts, (counts[0], None, counts[1], in_rank))
        assert counts[1].sum() == 2 and counts[0].tolist() == [2, 0]
        with pytest.raises(ValueError, match=rf"topk_idx.*the id ({case.experts}|-7), expected"):
            buffer.get_dispatch_layout(torch.zeros(2, 2, dtype=torch.int64), case.experts)
        buffer.get_dispatch_layout(torch.zeros(2, 2, dtype=torch.int64), case.experts)

    run_ranks(2, on_each_rank, seed=1)
