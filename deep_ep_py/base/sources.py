"""The C++ sources that come with the package."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]
_DEVICE_FOLDERS = ("wire", "device", "fabric", "kernels")


def include_root() -> Path:
    """Return the folder of the C++ sources: next to the package in a checkout, inside it once installed."""
    installed = _PACKAGE / "csrc"
    return installed if installed.is_dir() else _PACKAGE.parent / "csrc"


@cache
def sources_hash() -> str:
    """Hash all headers that kernels may include. Done once per process, so later changes go unnoticed."""
    digest, root = hashlib.sha256(), include_root()
    for folder in _DEVICE_FOLDERS:
        for path in sorted((root / folder).rglob("*.h")):
            digest.update(f"{path.relative_to(root)}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()
