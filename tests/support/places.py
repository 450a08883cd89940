"""The locations of the project's parts, and what processes started by tests need to find them."""

from __future__ import annotations

import os
from pathlib import Path

SUPPORT = Path(__file__).resolve().parent
TESTS = SUPPORT.parent
ROOT = TESTS.parent
CSRC = ROOT / "csrc"
SCRIPTS = ROOT / "scripts"
NATIVE = TESTS / "native"
WORKERS = SUPPORT / "workers"
DATA = SUPPORT / "data"
LONG_RESULTS = ROOT / "out" / "long"


def python_path(*first: Path) -> str:
    """Return a `PYTHONPATH` for a worker: `first`, the tests' imports, the package, then the current value."""
    there = os.environ.get("PYTHONPATH", "")
    return os.pathsep.join(filter(None, [*map(str, (*first, SUPPORT, ROOT)), there]))
