"""A forked child has the Buffer of its parent in memory but is not a rank: its end must not affect the others."""

from __future__ import annotations

from typing import Any

import pytest

from deep_ep_py.base.native import C
from worker_runs import lines_of

pytestmark = [pytest.mark.thorough, pytest.mark.timed, pytest.mark.once]


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, Any]]:
    return lines_of("forked_children.py", seconds=150)


@pytest.mark.parametrize(
    ("way", "fabric"),
    [
        ("fork", "peer"),
        ("fork", "ibgda"),
        pytest.param("fork", "proxy", marks=pytest.mark.skipif(not C.proxy_providers(), reason="no libfabric")),
        ("Process", "peer"),
        ("DataLoader", "peer"),
        ("with", "peer"),
    ],
)
def test_the_ranks_go_on(outcomes: list[dict[str, Any]], way: str, fabric: str) -> None:
    """P14, P15: with a dispatch in flight while the child ends; calls of the child are refused."""
    ended = [one for one in outcomes if (one["fabric"], one["way"]) == (fabric, way)]
    assert sorted(one["rank"] for one in ended) == [0, 1], outcomes
    assert all(one["error"] is None for one in ended), ended
