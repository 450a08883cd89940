"""Random sequences of operations on one Buffer across nodes, with random shapes, nodes, routings and schedules."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given, settings

from builds import EXAMPLES
from cases import Case
from deep_ep_py.testing import run_ranks
from harness import Trial, cramped, make_buffer
from programs import run_program
from strategies import Scenario, scenarios_on_nodes


def on_each_rank(group: Any, scenario: Scenario, trials: list[Trial], largest: Case) -> None:
    options = {"regions": scenario.regions, "arena_bytes": scenario.arena_bytes}
    run_program(make_buffer(group, largest, scenario.fabric, **options), scenario, trials)


# Each example has up to 8 ranks.
@settings(max_examples=max(4, EXAMPLES // 4))
@given(scenarios_on_nodes())
def test_programs_on_nodes(scenario: Scenario) -> None:
    cases = scenario.cases
    trials = [Trial.of(case, scenario.seed + number) for number, case in enumerate(cases)]
    most = {name: max(getattr(case, name) for case in cases) for name in ("hidden", "topk", "experts")}
    largest = replace(cases[0], tokens=0, **most)
    if scenario.room is not None:
        largest = cramped(largest, scenario.fabric, scenario.room, scenario.regions)
    run_ranks(cases[0].ranks, on_each_rank, scenario, trials, largest, seed=scenario.schedule)
