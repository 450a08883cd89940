"""P2: operation n uses region n mod D, whatever its mode and shapes, and stays inside it."""

from __future__ import annotations

import re
from typing import Any

import pytest

import deep_ep_py as deep_ep
from builds import FABRICS
from cases import Case
from deep_ep_py.testing import run_ranks
from harness import Trial, dispatch_arguments, make_buffer, under_schedules

SHAPES = [
    Case("narrow", ranks=4, tokens=9, hidden=8, topk=1, experts=4),
    Case("wide", ranks=4, tokens=(3, 0, 17, 5), hidden=520, topk=3, experts=8),
    Case("many_experts", ranks=4, tokens=6, hidden=40, topk=8, experts=128),
]


@pytest.mark.parametrize("arena_bytes", [None, 0], ids=["direct", "rounds"])
@pytest.mark.parametrize("regions", [2, 3])
@pytest.mark.parametrize("fabric", FABRICS)
def test_shapes_share_regions(fabric: str, regions: int, arena_bytes: int | None) -> None:
    """A region serves one shape after another without cleaning. If the places of words depended on the shape, a word
    would hold leftovers of another shape."""
    trials = [Trial.of(case) for case in SHAPES]

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, SHAPES[0], fabric, regions=regions, arena_bytes=arena_bytes)
        rank = buffer.rank
        handles: dict[int, Any] = {}
        # Each shape uses each region, with 2 and with 3 regions.
        for turn in (0, 1, 2, 2, 0, 1, 1, 2, 0):
            trial = trials[turn]
            results = buffer.dispatch(**dispatch_arguments(trial.work, rank))
            trial.check_dispatch(rank, results)
            handles[turn] = results[4]
            other = max(handles)
            trials[other].check_combine(rank, trials[other].combine(buffer, rank, handles[other]))

    under_schedules(4, on_each_rank)


@pytest.mark.parametrize("fabric", FABRICS)
def test_what_does_not_fit_says_what_would(fabric: str) -> None:
    """Rows so wide that not even the smallest round fits are refused on every rank before anything is launched, with
    the number of bytes that would suffice; narrower rows still work."""
    wide = Trial.of(Case("wide", ranks=2, tokens=5, hidden=4096, topk=2, experts=4))
    narrow = Trial.of(Case("narrow", ranks=2, tokens=5, hidden=8, topk=2, experts=4))

    def refuse(group: Any) -> int:
        buffer = make_buffer(group, narrow.case, fabric, num_nvl_bytes=1 << 16)
        with pytest.raises(ValueError, match="num_nvl_bytes") as info:
            buffer.dispatch(**dispatch_arguments(wide.work, buffer.rank))
        narrow.check_dispatch(buffer.rank, buffer.dispatch(**dispatch_arguments(narrow.work, buffer.rank)))
        return max(int(number) for number in re.findall(r"\d+", str(info.value)))

    needed = run_ranks(2, refuse, seed=1)
    assert needed[0] == needed[1] > 1 << 16

    def accept(group: Any) -> None:
        buffer = make_buffer(group, wide.case, fabric, num_nvl_bytes=needed[0], arena_bytes=0)
        results = buffer.dispatch(**dispatch_arguments(wide.work, buffer.rank, config=deep_ep.Config(num_sms=2)))
        wide.check_dispatch(buffer.rank, results)
        wide.check_combine(buffer.rank, wide.combine(buffer, buffer.rank, results[4]))

    run_ranks(2, accept, seed=1)
