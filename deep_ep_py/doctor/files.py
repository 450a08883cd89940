"""The files in which Linux describes a machine."""

from __future__ import annotations

from pathlib import Path


class Files:
    """Reads /proc, /sys and the like, or a copy of another machine's.

    Parameters
    ----------
    root : Path
        The folder that holds them.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    @property
    def live(self) -> bool:
        """Whether they are this machine's own."""
        return self.root.resolve() == Path("/")

    def path(self, path: str) -> Path:
        """Return where a file lies that the machine knows by an absolute path."""
        return self.root / path.lstrip("/")

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
            return place.read_bytes() if place.is_file() else None  # a pipe would wait for its writer
        except OSError:
            return None

    def names(self, path: str) -> list[str]:
        """Return what a folder holds, in order; nothing where it cannot be read."""
        try:
            return sorted((entry.name for entry in self.path(path).iterdir()), key=_by_number)
        except OSError:
            return []

    def exists(self, path: str) -> bool:
        """Tell whether there is such a file or folder."""
        try:
            return self.path(path).exists()
        except OSError:  # in a folder that this user may not enter
            return False

    def resolved(self, path: str) -> str:
        """Return the path that a link leads to, within the root; the link's own where it leads in a circle."""
        try:
            resolved, root = self.path(path).resolve(), self.root.resolve()
        except (OSError, RuntimeError):
            return path
        return "/" + str(resolved.relative_to(root)) if resolved.is_relative_to(root) else str(resolved)


def _by_number(name: str) -> tuple[str, int]:
    digits = len(name) - len(name.rstrip("0123456789"))
    return (name[:-digits], int(name[-digits:])) if digits else (name, -1)
