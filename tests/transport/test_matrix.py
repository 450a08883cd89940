"""The table of paths between ranks, for few and for many ranks."""

from __future__ import annotations

import pytest

from deep_ep_py.transport.topology.matrix import matrix, ranks_text

pytestmark = pytest.mark.once

Job = tuple[list[list[str]], list[tuple[str, list[int]]]]


def job(machines: int, of_each: int) -> Job:
    """Return the paths within and between machines, and the ranks of each machine."""
    places = [(f"node{m}", [m * of_each + i for i in range(of_each)]) for m in range(machines)]
    ranks = machines * of_each
    routes = [["peer" if a // of_each == b // of_each else "proxy" for b in range(ranks)] for a in range(ranks)]
    return routes, places


def test_few_ranks() -> None:
    lines = matrix(*job(2, 2), 80)
    assert lines[:5] == ["   0123", "0  .PXX", "1  P.XX", "2  XX.P", "3  XXP."]
    assert lines[5:] == ["P: peer, loads and stores", "X: proxy, a host thread posts"]


def test_columns_are_numbered_from_top_to_bottom() -> None:
    lines = matrix(*job(1, 12), 80)
    assert lines[:2] == ["              11", "    012345678901"]


def test_many_ranks_are_shown_by_machine() -> None:
    lines = matrix(*job(9, 8), 80)
    assert lines[0] == "   012345678"
    assert lines[1:10] == [f"{m}  " + "".join("P" if m == other else "X" for other in range(9)) for m in range(9)]
    assert "machine 3: ranks 24-31, node3" in lines


def test_paths_that_differ_within_a_pair_of_machines() -> None:
    routes, machines = job(9, 8)
    routes[0][8] = "ibgda"
    lines = matrix(routes, machines, 80)
    assert lines[1] == "0  P*XXXXXXX" and "*: several of these" in lines


def test_rows_that_are_equal_share_a_line() -> None:
    # Two ranks per machine, so that a machine has a path to itself.
    machines = [(f"node{m}", [m, (m + 1) % 70]) for m in range(70)]
    assert "0-69  " + "X" * 70 in matrix([["proxy"] * 70] * 70, machines, 80)


@pytest.mark.parametrize(("machines", "of_each"), [(1, 64), (300, 1), (128, 8), (1, 128)])
@pytest.mark.parametrize("width", [40, 78, 200])
def test_no_line_is_wider_than_the_terminal(machines: int, of_each: int, width: int) -> None:
    lines = matrix(*job(machines, of_each), width)
    assert max(map(len, lines)) <= width
    rows = [line for line in lines if line.lstrip()[:1].isdigit() and line.rstrip()[-1] in ".PX"]
    cells = machines if machines * of_each > 64 else machines * of_each
    assert sum(len(line.split()[-1]) for line in rows) == cells * cells, "a cell is missing"


def test_paths_without_a_letter_are_shown() -> None:
    routes, machines = job(1, 3)
    routes[0][1:] = ["copper", "none"]
    lines = matrix(routes, machines, 80)
    assert lines[1:] == ["0  .?-", "1  P.P", "2  PP.", "P: peer, loads and stores", "-: none", "?: some other path"]


@pytest.mark.parametrize(("ranks", "text"), [([3], "rank 3"), ([0, 1, 2, 7], "ranks 0-2, 7"), ([0, 2], "ranks 0, 2")])
def test_ranks_are_named_in_runs(ranks: list[int], text: str) -> None:
    assert ranks_text(ranks) == text
