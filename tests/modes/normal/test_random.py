"""Random sequences of operations on one Buffer, with random shapes, routings and schedules."""

from __future__ import annotations

from typing import Any

from hypothesis import given

import deep_ep_py as deep_ep
from cases import AMPLE
from deep_ep_py.testing import run_ranks
from harness import Trial
from programs import run_program
from strategies import Scenario, scenarios


def on_each_rank(group: Any, scenario: Scenario, trials: list[Trial]) -> None:
    buffer = deep_ep.Buffer(
        group,
        num_nvl_bytes=AMPLE,
        fabric=scenario.fabric,
        regions=scenario.regions,
        arena_bytes=scenario.arena_bytes,
    )
    run_program(buffer, scenario, trials)


@given(scenarios())
def test_programs(scenario: Scenario) -> None:
    trials = [Trial.of(case, scenario.seed + number) for number, case in enumerate(scenario.cases)]
    run_ranks(scenario.cases[0].ranks, on_each_rank, scenario, trials, seed=scenario.schedule)
