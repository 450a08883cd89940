"""What callers of DeepEP 1.2 and 2 get from `import deep_ep`, once `take_names` or the shim has put it there."""

from typing import Any

import deep_ep_py
from deep_ep_py import (
    Config,
    EPHandle,
    EventHandle,
    EventOverlap,
    get_logical_domain_size,
    get_physical_domain_size,
    topk_idx_t,
)
from deep_ep_py.base import absent

from . import cpp as _C
from . import utils
from .buffer import Buffer
from .elastic import ElasticBuffer
from .names import take_names

__version__ = f"1.2.1+deep_ep_py.{deep_ep_py.__version__}"

__all__ = [
    "Buffer",
    "Config",
    "EPHandle",
    "ElasticBuffer",
    "EventHandle",
    "EventOverlap",
    "_C",
    "__version__",
    "get_logical_domain_size",
    "get_physical_domain_size",
    "take_names",
    "topk_idx_t",
    "utils",
]


def __getattr__(name: str) -> Any:
    raise absent.missing("'deep_ep' (of deep_ep_py)", name)
