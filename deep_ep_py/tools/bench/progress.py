"""The progress display of a run."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text

_BAR_WIDTH = 20  # leaves half of 80 columns to the description


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


class _StepsColumn(MofNCompleteColumn):
    """The steps done and their number; nothing where the number is unknown."""

    def render(self, task: Task) -> Text:
        return Text() if task.total is None else super().render(task)


class BenchProgress:
    """A bar per size, fed by the events of rank 0; where there is no terminal to draw it on, a line per size.

    Parameters
    ----------
    console
        Where to show it.
    """

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(_BAR_WIDTH),
            _StepsColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._console = console
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
            if not self._console.is_terminal:
                self._console.print(f"{self._label} ...")
        elif event["kind"] == "step":
            note = f": {event['note']}" if "note" in event else ""
            self._progress.update(self._task, completed=event["step"] + 1, description=self._label + note)
        elif event["kind"] == "check":
            self._progress.update(self._task, description=f"{self._label}: checking {event['name']}")
