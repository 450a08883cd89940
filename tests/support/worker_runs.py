"""Runs a script of `tests/support/workers` that reports in lines of JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from builds import BUILD, LONG
from places import LONG_RESULTS, WORKERS, python_path


def lines_of(worker: str, *options: str, seconds: float) -> list[dict[str, Any]]:
    """Run a worker with the build under test and return its reports; it must end well within `seconds`.

    In a long suite its progress shows on the terminal, and `out/long` keeps the reports.
    """
    environment = {**os.environ, "DEEP_EP_BUILD": BUILD, "PYTHONPATH": python_path()}
    command = [sys.executable, str(WORKERS / worker), *options]
    shown = None if LONG else subprocess.PIPE
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=shown, text=True, timeout=seconds)
    if LONG:
        LONG_RESULTS.mkdir(parents=True, exist_ok=True)
        (LONG_RESULTS / f"{Path(worker).stem}.jsonl").write_text(done.stdout)
    assert done.returncode == 0, done.stdout + (done.stderr or "")
    return [json.loads(line) for line in done.stdout.splitlines()]


def show(title: str, **figures: Any) -> None:
    """Print figures, which remain on the terminal in a long suite."""
    table = Table("", title, box=box.SIMPLE, show_header=True)
    for name, figure in figures.items():
        table.add_row(name.replace("_", " "), str(figure))
    Console(highlight=False).print(table)
