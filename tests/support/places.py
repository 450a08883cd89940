"""Where the project's parts lie, and what the processes that tests start need to find them."""

from __future__ import annotations

import os
from pathlib import Path

SUPPORT = Path(__file__).resolve().parent
TESTS = SUPPORT.parent
ROOT = TESTS.parent
CSRC = ROOT / "csrc"
SCRIPTS = ROOT / "scripts"
NATIVE = TESTS / "native"
WORKERS = TESTS / "workers"
DATA = TESTS / "data"
LONG_RESULTS = ROOT / "out" / "long"


def python_path(*first: Path) -> str:
    """A `PYTHONPATH` for a worker: `first`, what tests import, the package, then what is there already."""
    there = os.environ.get("PYTHONPATH", "")
    return os.pathsep.join(filter(None, [*map(str, (*first, SUPPORT, ROOT)), there]))
