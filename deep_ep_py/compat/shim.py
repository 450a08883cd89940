"""Puts `deep_ep` and `deep_ep_cpp` on an environment's path: two files that map the names to `deep_ep_py.compat`."""

from __future__ import annotations

import importlib
import importlib.util
import shutil
import sysconfig
from importlib.machinery import ModuleSpec
from pathlib import Path

_MARK = "# deep_ep_py put this here: `python -m deep_ep_py shim --remove` takes it away."
_SOURCE = f"""{_MARK}
from deep_ep_py.compat import take_names

take_names()
"""
_FILES = {"deep_ep": "deep_ep/__init__.py", "deep_ep_cpp": "deep_ep_cpp.py"}


class ShimError(RuntimeError):
    """The shim cannot be installed or removed; the message says what is in the way, and where."""


def site_folder() -> Path:
    """Return the folder in which the running environment keeps pure Python packages."""
    return Path(sysconfig.get_path("purelib")).resolve()


def install(folder: Path) -> bool:
    """Write the files. Return False if they are already there.

    Raises
    ------
    ShimError
        Another package has one of the names, or the folder is not on Python's path or cannot be written to.
    """
    for name in _FILES:
        _check_ours(name, folder)
        found = _found(name)
        if found is not None and not _is_ours(found):
            raise ShimError(f"`import {name}` finds {found}, which is not part of deep_ep_py: remove it first")
    there = [_read(folder / file) for file in _FILES.values()]
    if all(source == _SOURCE for source in there):
        return False
    try:
        for file in _FILES.values():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_text(_SOURCE)
    except OSError as error:
        raise ShimError(f"cannot write to {folder}: {error.strerror}; is this the environment you mean?") from error
    if any(_found(name) != folder / file for name, file in _FILES.items()):
        remove(folder)
        raise ShimError(f"{folder} is not on Python's path: files there would not be found")
    return True


def remove(folder: Path) -> bool:
    """Delete the files that `install` wrote, and nothing else. Return False if there are none.

    Raises
    ------
    ShimError
        Another package has one of the names there, or has put files beside ours.
    """
    for name in _FILES:
        _check_ours(name, folder)
    files = [folder / file for file in _FILES.values() if (folder / file).exists()]
    try:
        for file in files:
            if file.parent == folder:
                file.unlink()
                Path(importlib.util.cache_from_source(str(file))).unlink(missing_ok=True)
            else:
                shutil.rmtree(file.parent)
    except OSError as error:
        raise ShimError(f"cannot remove {error.filename}: {error.strerror}") from error
    importlib.invalidate_caches()
    return bool(files)


def status(folder: Path) -> str:
    """Return a sentence that says what `import deep_ep` finds."""
    found, ours = _found("deep_ep"), folder / _FILES["deep_ep"]
    if found == ours and _is_ours(ours):
        return f"installed in {folder}: `import deep_ep` finds deep_ep_py"
    if found is None:
        return f"not installed in {folder}: `import deep_ep` finds nothing"
    beside = f"installed in {folder}, but" if _is_ours(ours) else f"not installed in {folder}:"
    return f"{beside} `import deep_ep` finds {found}"


def _check_ours(name: str, folder: Path) -> None:
    """Raise if the folder holds something under the name that is not ours."""
    file = folder / _FILES[name]
    root = folder / Path(_FILES[name]).parts[0]
    if not root.exists():
        return
    if not _is_ours(file):
        raise ShimError(f"{root} is not part of deep_ep_py: left unchanged")
    # Bytecode, of this or another Python, is not another package's file.
    expected = {file.name, "__pycache__"}
    others = sorted(path.name for path in root.iterdir() if path.name not in expected) if root.is_dir() else []
    if others:
        raise ShimError(f"{root} holds more than deep_ep_py put there: {', '.join(others)}")


def _read(file: Path) -> str | None:
    return file.read_text(errors="replace") if file.is_file() else None


def _is_ours(file: Path) -> bool:
    return (_read(file) or "").startswith(_MARK)


def _found(name: str) -> Path | None:
    """Return the file that an import would run. A folder without one loses to any package, so it does not count."""
    importlib.invalidate_caches()
    spec: ModuleSpec | None = importlib.util.find_spec(name)
    return Path(spec.origin).resolve() if spec is not None and spec.origin is not None else None
