"""Files that commands write."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any


def write_json(path: Path, value: Any) -> None:
    """Write a value as indented JSON, creating the folder if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=2) + "\n")


def check_writable(path: Path) -> None:
    """Check that a file can be written later, by a writer that makes its folder.

    Parameters
    ----------
    path
        The file. It stays as it is; if it or its folder does not exist, they still do not exist afterwards.

    Raises
    ------
    OSError
        The file or its folder cannot be written.
    """
    above = next((folder for folder in path.parents if folder.exists()), path.parent)
    if above != path.parent or not above.is_dir():
        try:
            with tempfile.TemporaryFile(dir=above):  # only an attempt tells: root may write anywhere
                return
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(above)) from None
    existed = path.exists()
    with path.open("a"):
        pass
    if not existed:
        path.unlink(missing_ok=True)  # ranks under torchrun check the same file at the same time
