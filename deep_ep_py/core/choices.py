"""Ways of doing the same that only a measurement can choose between; the environment says which, for measuring."""

from __future__ import annotations

import os

COPIES = "DEEP_EP_COPIES"
"""How kernels copy dispatched rows, on a GPU alone: "bulk" (the default, where it has such copies) or "vector"."""

COMBINE = "DEEP_EP_COMBINE"
"""How rows come back where ranks have each other's memory mapped: "pull" (the default), their owners read them in
place, or "push", the rank that has them sends them in chunks. Each rank chooses for the rows that it has."""

LAUNCH = "DEEP_EP_LAUNCH"
"""How kernels are launched on a GPU: "cooperative" (the default), the driver refuses a launch whose blocks would not
all be resident at once, or "plain", without asking it. The library counts blocks itself either way; `python -m
deep_ep_py canary` tells with which of the two kernels of several ranks run side by side on a GPU."""

_CHOICES = {COPIES: ("bulk", "vector"), COMBINE: ("pull", "push"), LAUNCH: ("cooperative", "plain")}


def chosen(variable: str) -> str:
    """Return what the environment chooses, else the default.

    Parameters
    ----------
    variable
        `COPIES`, `COMBINE` or `LAUNCH`.

    Raises
    ------
    ValueError
        The environment has another value than those there are.
    """
    choices = _CHOICES[variable]
    value = os.environ.get(variable, choices[0])
    if value not in choices:
        raise ValueError(f"{variable}={value!r}: expected {' or '.join(map(repr, choices))}")
    return value


def all_chosen() -> dict[str, str]:
    """Return every choice by its variable, for a report."""
    return {variable: chosen(variable) for variable in _CHOICES}
