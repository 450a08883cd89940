"""Access to matplotlib, which only pictures need."""

from __future__ import annotations

import importlib.util
from typing import Any

INSTALL_HINT = "a plot needs matplotlib: pip install matplotlib"


def can_plot() -> bool:
    """Return whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def get_pyplot() -> Any:
    """Return matplotlib's pyplot, set up to draw into files."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
