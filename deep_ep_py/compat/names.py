"""Registers the modules of this package under the names that callers of DeepEP import."""

from __future__ import annotations

import importlib
import sys

_MODULES = {
    "deep_ep": "deep_ep_py.compat",
    "deep_ep._C": "deep_ep_py.compat.cpp",
    "deep_ep.buffer": "deep_ep_py.compat.buffer",
    "deep_ep.buffers": "deep_ep_py.compat.buffers",
    "deep_ep.buffers.elastic": "deep_ep_py.compat.elastic",
    "deep_ep.buffers.legacy": "deep_ep_py.compat.buffer",
    "deep_ep.utils": "deep_ep_py.compat.utils",
    "deep_ep.utils.envs": "deep_ep_py.compat.utils.envs",
    "deep_ep.utils.event": "deep_ep_py.compat.utils.event",
    "deep_ep.utils.gate": "deep_ep_py.compat.utils.gate",
    "deep_ep.utils.math": "deep_ep_py.compat.utils.math",
    "deep_ep.utils.refs": "deep_ep_py.compat.utils.refs",
    "deep_ep.utils.testing": "deep_ep_py.compat.utils.testing",
    "deep_ep_cpp": "deep_ep_py.compat.cpp",
}


def take_names() -> None:
    """Make `import deep_ep` and `import deep_ep_cpp` find deep_ep_py in this process, whatever else is installed.

    The imports return the very modules of `deep_ep_py.compat`. Call this before the first import of `deep_ep`.

    Raises
    ------
    ImportError
        Another `deep_ep` has already been imported.
    """
    ours = {name: importlib.import_module(target) for name, target in _MODULES.items()}
    for name, module in ours.items():
        # The shim's file calls this while its own, still empty module is registered under the name.
        there = sys.modules.get(name)
        spec = getattr(there, "__spec__", None)
        if there not in (None, module) and not getattr(spec, "_initializing", False):
            raise ImportError(f"{name} has been imported already, from {getattr(there, '__file__', 'elsewhere')}")
    sys.modules.update(ours)
