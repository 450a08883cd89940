"""A type of command-line option that several commands share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from deep_ep_py.core.files import check_writable


class OutputFile(click.Path):
    """A file that a command writes when it is done: refused before the work begins if it cannot be written."""

    name = "file"

    def __init__(self) -> None:
        super().__init__(dir_okay=False, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Check that the file can be written."""
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        try:
            check_writable(path)
        except OSError as error:
            self.fail(f"cannot be written: {error}", param, ctx)
        return path
