"""Sequences of operations on one Buffer, drawn with their shapes, routings and schedule."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from hypothesis import given

import deep_ep_py as deep_ep
from cases import AMPLE
from deep_ep_py.testing import run_ranks
from harness import Trial, dispatch_arguments
from strategies import Scenario, scenarios


def on_each_rank(group: Any, scenario: Scenario, trials: list[Trial]) -> None:
    buffer = deep_ep.Buffer(
        group,
        num_nvl_bytes=AMPLE,
        fabric=scenario.fabric,
        regions=scenario.regions,
        arena_bytes=scenario.arena_bytes,
    )
    rank = buffer.rank
    handles: list[tuple[Trial, Any]] = []
    kept: list[Callable[[], None]] = []
    for step in scenario.program:
        config = deep_ep.Config(num_sms=step.blocks)
        if step.kind == "dispatch" or not handles:
            trial = trials[step.pick % len(trials)]
            arguments = dispatch_arguments(
                trial.work, rank, expert_alignment=trial.case.expert_alignment, config=config
            )
            results = buffer.dispatch(**arguments)
            handles.append((trial, results[4]))
            check = partial(trial.check_dispatch, rank, results)
        elif step.kind == "cached":
            trial, handle = handles[step.pick % len(handles)]
            results = buffer.dispatch(trial.work.x[rank], handle=handle, config=config)
            check = partial(trial.check_cached, rank, results)
        else:
            trial, handle = handles[step.pick % len(handles)]
            results = trial.combine(buffer, rank, handle, step.biases, step.weights, config=config)
            check = partial(trial.check_combine, rank, results, step.biases, step.weights)
        check()
        if step.keep:
            kept.append(check)
    # Nothing that came later has touched what the caller kept.
    for check in kept:
        check()


@given(scenarios())
def test_programs(scenario: Scenario) -> None:
    trials = [Trial.of(case, scenario.seed + number) for number, case in enumerate(scenario.cases)]
    run_ranks(scenario.cases[0].ranks, on_each_rank, scenario, trials, seed=scenario.schedule)
