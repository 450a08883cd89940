"""Texts for people."""

from __future__ import annotations


def size_text(size: int) -> str:
    """Return a number of bytes in a readable form."""
    for unit, name in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size / unit:.1f} {name}"
    return f"{size} bytes"
