"""A type of command-line option that several commands share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from deep_ep_py.base.files import check_writable

PICTURES = (".png", ".svg", ".pdf")
"""Endings of pictures."""


class OutputFile(click.Path):
    """A file that a command writes when it is done: refused before the work begins if it cannot be written.

    `endings`: those that its name may have; none: any.
    """

    name = "file"

    def __init__(self, *endings: str) -> None:
        super().__init__(dir_okay=False, path_type=Path)
        self._endings = endings

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Check that the file can be written."""
        if not value:
            self.fail("expected the name of a file", param, ctx)
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        if self._endings and path.suffix.lower() not in self._endings:
            self.fail(f"{path}: expected a file that ends in {' or '.join(self._endings)}", param, ctx)
        try:
            check_writable(path)
        except OSError as error:
            reason = "not a directory" if isinstance(error, FileExistsError | NotADirectoryError) else error.strerror
            self.fail(f"{path} cannot be written: {error.filename or path}: {reason}", param, ctx)
        return path
