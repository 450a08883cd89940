"""Names that DeepEP has in versions this library does not follow, and why they are absent here.

`hasattr` is False for them. `from deep_ep import ElasticBuffer` tries to import a module of a name that the package
lacks; so that it says more than that there is none, the modules of this folder, which both packages search, raise the
reason.
"""

from __future__ import annotations

_V2 = "DeepEP's V2 interface is not offered, V1's `Buffer` is: use its `get_dispatch_layout`, `dispatch` and `combine`"
_HYBRID = (
    "DeepEP's hybrid-ep branch is not offered, V1's `Buffer` is, on several nodes too: use its `get_dispatch_layout`, "
    "`dispatch` and `combine`"
)
REASONS = {
    **dict.fromkeys(("ElasticBuffer", "EPHandle", "get_physical_domain_size", "get_logical_domain_size"), _V2),
    **dict.fromkeys(("HybridEPBuffer", "hybrid_ep_buffer"), _HYBRID),
}


def missing(package: str, name: str) -> AttributeError:
    """Make what a package raises of a name that it does not have."""
    reason = f": {REASONS[name]}" if name in REASONS else ""
    return AttributeError(f"module {package} has no attribute {name!r}{reason}", name=name)


def refusal(module: str) -> ImportError:
    """Make what a module of this folder raises when it is imported."""
    package, _, name = module.rpartition(".")
    of = "'deep_ep_py'" if package == "deep_ep_py" else "'deep_ep' (of deep_ep_py)"
    return ImportError(f"cannot import {name!r} from {of}: {REASONS[name]}", name=module)
