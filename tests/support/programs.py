"""Runs a program drawn by hypothesis on one rank, and checks the result of every operation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import deep_ep_py as deep_ep
from harness import Trial, dispatch_arguments
from strategies import Scenario


def run_program(buffer: deep_ep.Buffer, scenario: Scenario, trials: list[Trial]) -> None:
    """Run operations one after the other; results that the caller keeps are checked again at the end."""
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
    # Later operations must not have touched what the caller kept.
    for check in kept:
        check()
