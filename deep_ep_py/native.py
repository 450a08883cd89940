"""The extension module, in the variant that `DEEP_EP_BUILD` names.

`fast` is for use; `exact`, `tsan` and `asan` run the same kernels with 32 lanes per warp under checkers.
"""

from __future__ import annotations

import importlib
import os

BUILDS = ("fast", "exact", "tsan", "asan")

BUILD = os.environ.get("DEEP_EP_BUILD", "fast")
if BUILD not in BUILDS:
    raise ImportError(f"DEEP_EP_BUILD={BUILD!r}: expected one of {', '.join(BUILDS)}")

try:
    C = importlib.import_module(f"deep_ep_py._C_{BUILD}")
except ModuleNotFoundError as error:
    raise ImportError(
        f"deep_ep_py's extension is not built in the variant {BUILD!r}: "
        f"run `DEEP_EP_BUILDS={BUILD} pip install .` or `make build`"
    ) from error

WARP_SIZE: int = C.WARP_SIZE
