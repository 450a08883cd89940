"""The names that callers of DeepEP import."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from deep_ep_py.compat import take_names


@contextmanager
def deep_ep_names() -> Iterator[None]:
    """Let `import deep_ep` find this library inside the `with`."""
    take_names()
    try:
        yield
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] in ("deep_ep", "deep_ep_cpp")]:
            del sys.modules[name]
