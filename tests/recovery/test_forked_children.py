"""A forked child has its parent's Buffer in memory, but is not its parent's rank: its end is nothing to the others."""

from __future__ import annotations

from typing import Any

import pytest

from deep_ep_py.core.native import C
from worker_runs import lines_of

pytestmark = [pytest.mark.timed, pytest.mark.once]


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
    """P14, P15: with a dispatch on its way while the child ends; the child's own calls are refused."""
    ended = [one for one in outcomes if (one["fabric"], one["way"]) == (fabric, way)]
    assert sorted(one["rank"] for one in ended) == [0, 1], outcomes
    assert all(one["error"] is None for one in ended), ended
