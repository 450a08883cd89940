"""Files that commands write, and files in memory."""

from __future__ import annotations

import errno
import json
import os
import tempfile
from pathlib import Path
from typing import Any

_NO_EXECUTION = 0x8  # MFD_NOEXEC_SEAL


def memory_file(name: str) -> int:
    """Return the descriptor of an anonymous file in memory, which vanishes with the last process that has it open.

    Systems with vm.memfd_noexec=2 refuse those that may be executed; before Linux 6.3 there were no others.
    """
    try:
        return os.memfd_create(name, os.MFD_CLOEXEC | _NO_EXECUTION)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return os.memfd_create(name)


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
