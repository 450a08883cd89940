"""Pictures for the examples, if matplotlib is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console

from deep_ep_py.base.pictures import INSTALL_HINT, can_plot, get_pyplot


def pyplot_for(console: Console) -> Any:
    """Return matplotlib's pyplot, for drawing to files; if it is not installed, tell the console and return None."""
    if not can_plot():
        console.print(f"no picture: {INSTALL_HINT}", markup=False)
        return None
    return get_pyplot()


def save_picture(figure: Any, path: Path, console: Console) -> None:
    """Write a figure, creating its folder, and print its path to the console."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    console.print(f"picture: {path}")
