"""Names from DeepEP versions that this library does not implement, with the reason why they are absent.

`hasattr` returns False for them. If the package lacks a name, `from deep_ep import HybridEPBuffer` tries to import a
submodule of that name. Both packages search this folder for submodules, so each module here raises the reason instead
of Python's generic error.
"""

from __future__ import annotations

_HYBRID = (
    "DeepEP's hybrid-ep branch is not available; use `get_dispatch_layout`, `dispatch` and `combine` of V1's `Buffer`, "
    "which works across nodes too"
)
REASONS = {
    **dict.fromkeys(("HybridEPBuffer", "hybrid_ep_buffer"), _HYBRID),
}


def missing(package: str, name: str) -> AttributeError:
    """Return the exception that a package raises for a name that it does not have."""
    reason = f": {REASONS[name]}" if name in REASONS else ""
    return AttributeError(f"module {package} has no attribute {name!r}{reason}", name=name)


def refusal(module: str) -> ImportError:
    """Return the exception that a module of this folder raises when it is imported."""
    package, _, name = module.rpartition(".")
    of = "'deep_ep_py'" if package == "deep_ep_py" else "'deep_ep' (of deep_ep_py)"
    return ImportError(f"cannot import {name!r} from {of}: {REASONS[name]}", name=module)
