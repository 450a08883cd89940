"""The progress display of a run."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


def make_console(quiet: bool = False) -> Console:
    """Return a console on standard output.

    Parameters
    ----------
    quiet
        Print nothing; for all ranks but one.

    Returns
    -------
    rich.console.Console
    """
    # A pipe has no width: use one that fits the tables.
    return Console(width=None if sys.stdout.isatty() else 80, quiet=quiet, highlight=False)


class BenchProgress:
    """A bar per size, fed by the events of rank 0.

    Parameters
    ----------
    console
        Where to show it.
    """

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
        )
        self._task = self._progress.add_task("starting the ranks", total=None)
        self._label = ""

    def __enter__(self) -> BenchProgress:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def on_event(self, event: dict[str, Any]) -> None:
        """Show what a rank reports."""
        if event["kind"] == "size":
            self._progress.remove_task(self._task)
            self._label = event["label"] if "label" in event else f"{event['tokens']} tokens per rank"
            self._task = self._progress.add_task(self._label, total=event["steps"])
        elif event["kind"] == "step":
            note = f": {event['note']}" if "note" in event else ""
            self._progress.update(self._task, completed=event["step"] + 1, description=self._label + note)
        elif event["kind"] == "check":
            self._progress.update(self._task, description=f"{self._label}: checking {event['name']}")
