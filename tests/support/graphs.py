"""Calls captured into a graph and replayed, on a GPU or on its stand-in."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import deep_ep_py as deep_ep
import oracle
from harness import Trial, dispatch_arguments


class Captured:
    """A dispatch, its combine and a cached dispatch, captured over tensors at fixed addresses.

    `capture` returns a context manager that captures; `replay` runs what was captured.
    """

    def __init__(
        self,
        buffer: deep_ep.Buffer,
        trials: list[Trial],
        capture: Callable[[], AbstractContextManager[Any]],
        replay: Callable[[], None],
        device: str = "cpu",
    ) -> None:
        self._rank, self._rows, self._replay = buffer.rank, max(trial.max_rows for trial in trials) + 3, replay
        arguments, expert = self._inputs(trials[0])
        self._arguments = {name: value.to(device, copy=True) for name, value in arguments.items()}
        self._expert = {name: value.to(device) for name, value in expert.items()}
        with capture():
            self._received = buffer.dispatch(**self._arguments, num_worst_tokens=self._rows)
            self._combined = buffer.combine(handle=self._received[4], **self._expert)
            self._again = buffer.dispatch(self._arguments["x"], handle=self._received[4])[0]

    def _inputs(self, trial: Trial) -> tuple[dict[str, Any], dict[str, Any]]:
        return dispatch_arguments(trial.work, self._rank), trial.padded(self._rank, self._rows)

    def run(self) -> None:
        """Replay on the current inputs."""
        self._replay()

    def replay(self, trial: Trial) -> None:
        """Replay on other inputs of the same shapes, and check the results."""
        arguments, expert = self._inputs(trial)
        for name, value in arguments.items():
            self._arguments[name].copy_(value)
        for name, value in expert.items():
            self._expert[name].copy_(value)
        self.run()
        trial.check_worst(self._rank, self._received, self._rows)
        trial.check_combine(self._rank, self._combined)
        expected = trial.received[self._rank].x
        wrong = oracle.difference("recv_x", self._again[: len(expected)].cpu(), expected)
        assert wrong is None, wrong
