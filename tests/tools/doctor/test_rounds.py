"""Which ranks send to which while paths are measured."""

from __future__ import annotations

import pytest

from deep_ep_py.tools.doctor.measured import rounds

pytestmark = pytest.mark.once


@pytest.mark.parametrize(("ranks", "per_node"), [(2, 1), (4, 4), (6, 2), (8, 4), (5, 1)])
def test_each_round_stays_inside_nodes_or_leaves_them(ranks: int, per_node: int) -> None:
    of_all = [[*rounds(rank, ranks, per_node)] for rank in range(ranks)]
    for step in zip(*of_all, strict=True):
        for rank, (_, target) in enumerate(step):
            assert step[target][0] == rank, "both ends of a round name each other"
        assert len({target // per_node == rank // per_node for rank, (_, target) in enumerate(step)}) == 1
    for rank, found in enumerate(of_all):
        assert sorted(target for _, target in found) == sorted({*range(ranks)} - {rank})
