"""GPU-initiated communication for mixture-of-experts layers: dispatch and combine, a drop-in for `deep_ep.Buffer`."""

import importlib
from typing import Any

from deep_ep_py._version import __version__
from deep_ep_py.base import absent

try:
    import torch
except ModuleNotFoundError as error:
    raise ImportError(
        "deep_ep_py needs PyTorch but does not choose a build of it for you: run `pip install torch` first"
    ) from error

from deep_ep_py.base.config import Config
from deep_ep_py.base.events import EventHandle, EventOverlap
from deep_ep_py.base.logs import configure as _configure_logs
from deep_ep_py.buffer import Buffer
from deep_ep_py.errors import DeadlockError, DeepEPError, DeepEPTimeout, SimtError
from deep_ep_py.transport.topology.link import Link
from deep_ep_py.transport.topology.nic import NicOptions
from deep_ep_py.v2.domains import get_logical_domain_size, get_physical_domain_size
from deep_ep_py.v2.elastic import ElasticBuffer
from deep_ep_py.v2.handle import EPHandle

topk_idx_t = torch.int64
_IMPORTED_ON_ACCESS = frozenset({"eplb", "moe", "ops", "testing"})
_configure_logs()

__all__ = [
    "Buffer",
    "Config",
    "DeadlockError",
    "DeepEPError",
    "DeepEPTimeout",
    "EPHandle",
    "ElasticBuffer",
    "EventHandle",
    "EventOverlap",
    "Link",
    "NicOptions",
    "SimtError",
    "__version__",
    "get_logical_domain_size",
    "get_physical_domain_size",
    "topk_idx_t",
]


def __getattr__(name: str) -> Any:
    if name in _IMPORTED_ON_ACCESS:
        return importlib.import_module(f"{__name__}.{name}")
    raise absent.missing("'deep_ep_py'", name)
