"""The extension module, in the variant named by `DEEP_EP_BUILD`.

`fast` is for normal use; `exact`, `tsan` and `asan` run the same kernels with several lanes per warp, under checkers.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

BUILDS = ("fast", "exact", "tsan", "asan")

BUILD = os.environ.get("DEEP_EP_BUILD", "fast")
if BUILD not in BUILDS:
    raise ImportError(f"DEEP_EP_BUILD={BUILD!r}: expected one of {', '.join(BUILDS)}")

if TYPE_CHECKING:
    from deep_ep_py import _C  # written by `make stubs`

    C = _C
else:
    try:
        C = importlib.import_module(f"deep_ep_py._C_{BUILD}")
    except ModuleNotFoundError as error:
        here = Path(__file__).resolve().parents[1]
        advice = (
            f"run `DEEP_EP_BUILDS={BUILD} make build` in {here.parent}, or leave that folder to use an installed one"
        )
        if not (here.parent / "setup.py").exists():
            advice = f"install it by `DEEP_EP_BUILDS={BUILD} pip install` from its sources"
        raise ImportError(f"{here} has no extension of the variant {BUILD!r}: {advice}") from error

WARP_SIZE: int = C.WARP_SIZE
