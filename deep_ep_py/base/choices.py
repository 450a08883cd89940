"""Choices that environment variables make for a measurement: between equivalent methods, and what kernels note."""

from __future__ import annotations

import os

COPIES = "DEEP_EP_COPIES"
"""How kernels copy dispatched rows, on GPUs only: "bulk" (the default where the GPU has bulk copies) or "vector"."""

COMBINE = "DEEP_EP_COMBINE"
"""How rows come back where ranks have each other's memory mapped. With "pull" (the default) the owners of the tokens
read them in place; with "push" the rank that holds them sends them in chunks. Each rank chooses for its own rows."""

EXPAND = "DEEP_EP_EXPAND"
"""Who puts rows into their first places in the expanded layout, where all ranks of one hop have each other's memory
mapped and the host waits for counts. With "senders" (the default) they store each row there, and the receiver makes
only the copies for further experts; with "receiver" it makes all of them, from rows that have arrived one per token.
The same on all ranks. On a CPU both take the same time at 4096 tokens, and "senders" 1.3x at 128."""

LAUNCH = "DEEP_EP_LAUNCH"
"""How kernels are launched on a GPU. With "cooperative" (the default) the driver refuses a launch whose blocks would
not all be resident at once; "plain" skips that check. The library counts blocks itself either way; `python -m
deep_ep_py canary` reports which of the two lets the kernels of several ranks run side by side on a GPU."""

STAGES = "DEEP_EP_STAGES"
"""Whether kernels note when each of their warps has ended each of its stages, for a timeline: "off" (the default) or
"on". On a GPU that takes kernels of their own, which are compiled at the first call."""

_CHOICES = {
    COPIES: ("bulk", "vector"),
    COMBINE: ("pull", "push"),
    EXPAND: ("senders", "receiver"),
    LAUNCH: ("cooperative", "plain"),
    STAGES: ("off", "on"),
}


def chosen(variable: str) -> str:
    """Return the choice made by the environment, or the default.

    Parameters
    ----------
    variable
        `COPIES`, `COMBINE`, `EXPAND`, `LAUNCH` or `STAGES`.

    Raises
    ------
    ValueError
        The environment has an unknown value.
    """
    choices = _CHOICES[variable]
    value = os.environ.get(variable) or choices[0]
    if value not in choices:
        raise ValueError(f"{variable}={value!r}: expected {' or '.join(map(repr, choices))}")
    return value


def all_chosen() -> dict[str, str]:
    """Return every choice, keyed by its variable, for a report."""
    return {variable: chosen(variable) for variable in _CHOICES}
