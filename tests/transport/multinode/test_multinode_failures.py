"""A failure on one rank of several nodes is reported to all of them, and they continue together."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import deep_ep_py as deep_ep
from harness import dispatch_arguments, round_trip


def test_another_hidden_size_is_told_to_all(world: Any, buffer: deep_ep.Buffer) -> None:
    """Even ranks that exchange no message with the deviating rank are told."""
    trial, odd = world.trial("uniform"), world.ranks - 1
    x = trial.work.x[world.rank]
    given = torch.cat([x, x], dim=1) if world.rank == odd else x
    with pytest.raises(deep_ep.DeepEPError, match="not match") as info:
        buffer.dispatch(**dispatch_arguments(trial.work, world.rank, x=given))
    assert f"rank {odd}" in str(info.value)
    buffer.recover()
    round_trip(buffer, world.rank, trial, blocks=2)
