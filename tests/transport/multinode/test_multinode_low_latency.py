"""Low-latency mode across several nodes against the oracle, alone and alongside normal mode."""

from __future__ import annotations

from typing import Any

import pytest

import deep_ep_py as deep_ep
import harness
from low_latency import CASTS, Work, round_trip


@pytest.mark.parametrize(("cast", "hooks"), [("bf16", False), ("fp8", True)])
def test_round_trip(cast: str, hooks: bool, work: Work, both_modes: deep_ep.Buffer) -> None:
    round_trip(both_modes, work, CASTS[cast], hooks)


def test_modes_take_turns(world: Any, work: Work, both_modes: deep_ep.Buffer) -> None:
    harness.round_trip(both_modes, world.rank, world.trial("uniform"), blocks=2)
    round_trip(both_modes, work)
