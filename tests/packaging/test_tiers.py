"""What `make test` leaves to `make test-all` in a sanitized build."""

from __future__ import annotations

import itertools

import pytest

from tiers import Values, beyond_coverage, covering, file_of, function_of, runs

pytestmark = pytest.mark.once

pytest_plugins = ["pytester"]


def product(**parameters: int) -> list[Values]:
    """Return the items of a cross product, given the number of values of each parameter."""
    choices = [[(name, str(value)) for value in range(count)] for name, count in parameters.items()]
    return [frozenset(values) for values in itertools.product(*choices)]


@pytest.mark.parametrize(
    ("items", "count"),
    [
        (product(case=7), 7),
        (product(case=7, fabric=3), 7),
        (product(case=2, fabric=3, blocks=3), 3),
        ([frozenset()], 0),
    ],
)
def test_every_value_occurs(items: list[Values], count: int) -> None:
    chosen = covering(items)
    assert len(chosen) == count
    assert frozenset().union(*(items[index] for index in chosen)) == frozenset().union(*items)


def test_values_occur_equally_often() -> None:
    items = product(case=9, fabric=3)
    chosen = [items[index] for index in covering(items)]
    for fabric in range(3):
        assert sum(("fabric", str(fabric)) in values for values in chosen) == 3


SUITE = """
import pytest

FABRICS = pytest.mark.parametrize("fabric", ["peer", "ibgda"])

@FABRICS
@pytest.mark.skipif(True, reason="not here")
def test_skipped(fabric): ...

@FABRICS
@pytest.mark.once
def test_of_another_build(fabric): ...

@FABRICS
@pytest.mark.skipif(False, reason="not here")
def test_one(fabric): ...

@FABRICS
def test_other(fabric): ...
"""


def test_what_does_not_run_covers_nothing(pytester: pytest.Pytester) -> None:
    items = pytester.getitems(SUITE)
    running = [item for item in items if runs(item)]
    assert {item.name.partition("[")[0] for item in running} == {"test_one", "test_other"}
    left = [item.name for item in running if item not in beyond_coverage(running, file_of)]
    assert left == ["test_one[peer]", "test_other[ibgda]"], "every test and every fabric"
    assert beyond_coverage(running, function_of) == []
