"""Which tests `make test` leaves to `make test-all`: those marked thorough, here or where they are defined.

The fast build runs every item of a cross product. A sanitizer looks at each access, at ten times the cost, and what one
fabric's code does wrong it does wrong in any case: in a sanitized build `make test` runs of each file only as many
items as it takes for every test, and every value of every parameter, to occur. Products that are marked `covers` take
so long that `make test` does the same with each of them in the fast build.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence

import pytest

Values = frozenset[tuple[str, str]]
"""The parameters of an item: names and values."""


def values_of(item: pytest.Item) -> Values:
    """Return the parameters of an item, and its test as one more."""
    callspec = getattr(item, "callspec", None)
    params = callspec.params if callspec is not None else {}
    return frozenset({("test", function_of(item)), *((name, repr(value)) for name, value in params.items())})


def function_of(item: pytest.Item) -> str:
    """Return the test of an item, without parameters."""
    return item.nodeid.partition("[")[0]


def file_of(item: pytest.Item) -> str:
    """Return the file of an item."""
    return item.nodeid.partition("::")[0]


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


def runs(item: pytest.Item) -> bool:
    """Return whether `make test` may run an item in a sanitized build: only then does it cover anything."""
    skipped = any(mark.args and mark.args[0] is True for mark in item.iter_markers("skipif"))
    return not skipped and all(item.get_closest_marker(mark) is None for mark in ("once", "skip", "thorough"))


def beyond_coverage(items: Iterable[pytest.Item], product_of: Callable[[pytest.Item], str]) -> list[pytest.Item]:
    """Return the items without which every value still occurs in each product; `product_of` names that of an item."""
    products: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        products[product_of(item)].append(item)
    return [
        item
        for product in products.values()
        for chosen in [covering([values_of(item) for item in product])]
        for index, item in enumerate(product)
        if index not in chosen
    ]
