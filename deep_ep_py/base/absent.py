"""Names from DeepEP versions that this library does not implement, with the reason why they are absent.

`hasattr` returns False for them. If the package lacks a name, `from deep_ep import HybridEPBuffer` tries to import a
submodule of that name: there Python's generic error is replaced by the reason.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

_HYBRID = (
    "DeepEP's hybrid-ep branch is not available; use `get_dispatch_layout`, `dispatch` and `combine` of V1's `Buffer`, "
    "which works across nodes too"
)
_OF_2_5 = "the interface of DeepEP 2.5 is not available"
_OTHERS_OF_2_5 = f"{_OF_2_5}, and neither is what it offers"
REASONS = {
    **dict.fromkeys(("HybridEPBuffer", "hybrid_ep_buffer"), _HYBRID),
    "EPBuffer": f"{_OF_2_5}; use `ElasticBuffer`, whose `dispatch` and `combine` it has",
    "EngramBuffer": f"{_OTHERS_OF_2_5}: Engram's remote fetches from CPU memory",
    "PPBuffer": f"{_OTHERS_OF_2_5}: pipeline-parallel send and receive",
    **dict.fromkeys(("BucketBuffer", "BucketSession"), f"{_OTHERS_OF_2_5}: all-gather, reduce-scatter and all-reduce"),
    **dict.fromkeys(
        (
            "BufferAllocator",
            "BufferBase",
            "comm",
            "destroy_all_managed_nccl_comm",
            "get_num_allocation_alignment",
            "get_num_rdma_alignment",
            "get_num_tma_alignment",
        ),
        f"{_OF_2_5}; Buffers allocate their memory and make their connections themselves",
    ),
}
_PACKAGES = ("deep_ep_py", "deep_ep_py.compat")
"""Their modules' own names; the latter is also imported as `deep_ep`."""


def missing(package: str, name: str) -> AttributeError:
    """Return the exception that a package raises for a name that it does not have."""
    reason = f": {REASONS[name]}" if name in REASONS else ""
    return AttributeError(f"module {package} has no attribute {name!r}{reason}", name=name)


class _Absent(MetaPathFinder, Loader):
    """Finds submodules of these names, after all that exist, and raises the reason when they are loaded."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        package, _, last = name.rpartition(".")
        ours = last in REASONS and getattr(sys.modules.get(package), "__name__", None) in _PACKAGES
        return ModuleSpec(name, self) if ours else None

    def exec_module(self, module: ModuleType) -> NoReturn:
        package, _, name = module.__name__.rpartition(".")
        of = "'deep_ep_py'" if package == "deep_ep_py" else "'deep_ep' (of deep_ep_py)"
        raise ImportError(f"cannot import {name!r} from {of}: {REASONS[name]}", name=module.__name__)


sys.meta_path.append(_Absent())
