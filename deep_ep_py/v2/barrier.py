"""V2's barrier: a dispatch of no tokens, whose counts reach every rank only once all ranks have begun it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from deep_ep_py.modes.normal.operations import DispatchArguments, PendingDispatch
from deep_ep_py.modes.normal.plans import way_of

if TYPE_CHECKING:
    from deep_ep_py.session.engine import Engine

_HIDDEN = 8
"""Elements of a row: the fewest. No row is sent."""


def prepare(engine: Engine) -> None:
    """Prepare its kernels."""
    notify, _, dispatch, _ = way_of(engine.topology).kernels
    engine.prepare(2 * _HIDDEN, 0, notify, dispatch)


def barrier(engine: Engine) -> None:
    """Make the caller's next work wait until all ranks have called this and all that each has queued before has ended.

    It is an operation like any other: bounded, ended by failures, without ranks that are left out, and captured into
    graphs. On a CPU it waits itself.
    """
    where, ranks = engine.device.torch_device, engine.ranks
    counts = torch.zeros(ranks, dtype=torch.int32, device=where)
    given = DispatchArguments(
        torch.empty((0, _HIDDEN), dtype=torch.bfloat16, device=where),
        num_tokens_per_rank=counts,
        is_token_in_rank=torch.empty((0, ranks), dtype=torch.bool, device=where),
        num_tokens_per_expert=counts,
        num_worst_tokens=1,
        called="barrier",
    )
    PendingDispatch.begin(engine, given).finish()
