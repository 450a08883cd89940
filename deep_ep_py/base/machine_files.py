"""Access to the files in which Linux describes a machine."""

from __future__ import annotations

import os
from pathlib import Path

_MACHINE = Path("/")
_MAX_LINKS = 40
"""Maximum number of links to follow for one file, as in Linux; more are taken for a cycle."""


class Files:
    """A reader for /proc, /sys and the like, or for a copy of another machine's.

    All links are resolved within the root, so an absolute link in a copy never leads to this machine.

    Parameters
    ----------
    root : Path
        The folder that contains them.
    live : bool
        Whether they belong to the machine of this process, so that /proc/self is this process.
    """

    def __init__(self, root: Path, live: bool = False) -> None:
        self.root = root
        self.live = live

    def path(self, path: str) -> Path | None:
        """Return the location of a file, given by its absolute path on the machine; None if links form a cycle."""
        if self.root == _MACHINE:  # the kernel follows links, and says so if they form a cycle
            return Path(path)
        parts = self._follow(path)
        return None if parts is None else self.root.joinpath(*parts)

    def text(self, path: str) -> str | None:
        """Return a file's text without surrounding whitespace; None if it cannot be read."""
        data = self._read(path)
        return None if data is None else data.decode(errors="replace").strip().strip("\0")

    def number(self, path: str) -> int | None:
        """Return the number in a file; None if it cannot be read or does not contain one."""
        try:
            return int(self.text(path) or "", 0)
        except ValueError:
            return None

    def data(self, path: str) -> bytes:
        """Return a file's bytes, or no bytes if it cannot be read."""
        return self._read(path) or b""

    def _read(self, path: str) -> bytes | None:
        try:
            place = self.path(path)
            if place is None or not place.is_file():  # reading a pipe would wait for its writer
                return None
            return place.read_bytes()
        except OSError:
            return None

    def names(self, path: str) -> list[str]:
        """Return the sorted names of a folder's entries, or none if it cannot be read."""
        try:
            place = self.path(path)
            return [] if place is None else sorted((entry.name for entry in place.iterdir()), key=_by_number)
        except OSError:
            return []

    def exists(self, path: str) -> bool:
        """Return whether a file or folder exists."""
        try:
            place = self.path(path)
            return place is not None and place.exists()
        except OSError:  # in a folder that this user may not enter
            return False

    def resolved(self, path: str) -> str:
        """Return the path that a link leads to on the machine; the path of the link itself if links form a cycle."""
        parts = self._follow(path)
        return path if parts is None else "/" + "/".join(parts)

    def _follow(self, path: str) -> list[str] | None:
        """Return the names from the root down to a file, with all links resolved."""
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
            except (OSError, ValueError):  # not a link, or it does not exist
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
