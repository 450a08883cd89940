"""Which tests `make test` leaves to `make test-all`: those marked thorough, here or where they are defined.

The fast build runs every item of a cross product. A sanitizer looks at each access, at ten times the cost, and what one
fabric's code does wrong it does wrong in any case: in a sanitized build `make test` runs only as many items as it takes
for every value of every parameter to occur. Together with the fast build these are all pairs of values, the build being
one of them. Products that are marked `covers` take so long that `make test` does the same in the fast build.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import pytest

Values = frozenset[tuple[str, str]]
"""The parameters of an item: names and values."""


def values_of(item: pytest.Item) -> Values:
    """Return the parameters of an item."""
    callspec = getattr(item, "callspec", None)
    return frozenset() if callspec is None else frozenset((n, repr(value)) for n, value in callspec.params.items())


def covering(products: Sequence[Values]) -> set[int]:
    """Return the indices of items in which every value occurs: each adds as many values as possible."""
    missing = set().union(*products)
    used: Counter[tuple[str, str]] = Counter()
    chosen: set[int] = set()
    while missing:
        best = max(
            (index for index in range(len(products)) if index not in chosen),
            key=lambda index: (len(products[index] & missing), -sum(used[value] for value in products[index]), -index),
        )
        chosen.add(best)
        used.update(products[best])
        missing -= products[best]
    return chosen


def beyond_coverage(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Return the items of cross products without which every value of every parameter still occurs."""
    tests: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        tests[item.nodeid.partition("[")[0]].append(item)
    return [
        item
        for product in tests.values()
        if len(product) > 1
        for chosen in [covering([values_of(item) for item in product])]
        for index, item in enumerate(product)
        if index not in chosen
    ]
