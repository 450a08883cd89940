"""The files in which Linux describes a machine."""

from __future__ import annotations

import os
from pathlib import Path

_MAX_LINKS = 40
"""On the way to one file, as Linux allows: more lead in a circle."""


class Files:
    """Reads /proc, /sys and the like, or a copy of another machine's.

    Links are followed within the root, wherever they point: an absolute link in a copy never leads to this machine.

    Parameters
    ----------
    root : Path
        The folder that holds them.
    live : bool
        Whether they are those of this process's machine, so that /proc/self is this process.
    """

    def __init__(self, root: Path, live: bool = False) -> None:
        self.root = root
        self.live = live

    def path(self, path: str) -> Path | None:
        """Return where a file lies that the machine knows by an absolute path; None where links lead in a circle."""
        parts = self._follow(path)
        return None if parts is None else self.root.joinpath(*parts)

    def text(self, path: str) -> str | None:
        """Return a file's text without blanks around it; None where it cannot be read."""
        data = self._read(path)
        return None if data is None else data.decode(errors="replace").strip().strip("\0")

    def number(self, path: str) -> int | None:
        """Return the number that a file holds; None where it cannot be read or holds none."""
        try:
            return int(self.text(path) or "", 0)
        except ValueError:
            return None

    def data(self, path: str) -> bytes:
        """Return a file's bytes; none where it cannot be read."""
        return self._read(path) or b""

    def _read(self, path: str) -> bytes | None:
        try:
            place = self.path(path)
            if place is None or not place.is_file():  # a pipe would wait for its writer
                return None
            return place.read_bytes()
        except OSError:
            return None

    def names(self, path: str) -> list[str]:
        """Return what a folder holds, in order; nothing where it cannot be read."""
        try:
            place = self.path(path)
            return [] if place is None else sorted((entry.name for entry in place.iterdir()), key=_by_number)
        except OSError:
            return []

    def exists(self, path: str) -> bool:
        """Tell whether there is such a file or folder."""
        try:
            place = self.path(path)
            return place is not None and place.exists()
        except OSError:  # in a folder that this user may not enter
            return False

    def resolved(self, path: str) -> str:
        """Return the path that a link leads to, as the machine knows it; the link's own where it leads in a circle."""
        parts = self._follow(path)
        return path if parts is None else "/" + "/".join(parts)

    def _follow(self, path: str) -> list[str] | None:
        """Return the names from the root down to a file, none of which is a link."""
        ahead, done, links = path.split("/")[::-1], list[str](), 0
        while ahead:
            name = ahead.pop()
            if name in ("", "."):
                continue
            if name == "..":
                del done[-1:]
                continue
            try:
                target = os.readlink(self.root.joinpath(*done, name))
            except (OSError, ValueError):  # no link, or nothing at all
                done.append(name)
                continue
            links += 1
            if links > _MAX_LINKS:
                return None
            if target.startswith("/"):
                done.clear()
            ahead += target.split("/")[::-1]
        return done


def _by_number(name: str) -> tuple[str, int]:
    digits = len(name) - len(name.rstrip("0123456789"))
    return (name[:-digits], int(name[-digits:])) if digits else (name, -1)
