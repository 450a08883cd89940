"""Files that commands write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def write_json(path: Path, value: Any) -> None:
    """Write a value as indented JSON, creating the folder if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=2) + "\n")


def check_writable(path: Path) -> None:
    """Check that a file can be written later, and make its folder.

    Parameters
    ----------
    path
        The file. It stays as it is; if it does not exist, it still does not exist afterwards.

    Raises
    ------
    OSError
        The file or its folder cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    existed = path.exists()
    with path.open("a"):
        pass
    if not existed:
        path.unlink(missing_ok=True)  # ranks under torchrun check the same file at the same time
