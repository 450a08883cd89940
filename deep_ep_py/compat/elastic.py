"""`deep_ep.ElasticBuffer`: deep_ep_py's, on a GPU if there is one; and what callers import beside it."""

from __future__ import annotations

from typing import Any

import torch

import deep_ep_py
from deep_ep_py import EPHandle, EventHandle, EventOverlap

from .buffer import default_device

__all__ = ["EPHandle", "ElasticBuffer", "EventHandle", "EventOverlap"]


class ElasticBuffer(deep_ep_py.ElasticBuffer):
    """A `deep_ep_py.ElasticBuffer`, on a GPU if there is one.

    Parameters
    ----------
    *args, **options
        As in `deep_ep_py.ElasticBuffer`.
    device : torch.device or str, optional
        Where tensors live. Default: the environment variable DEEP_EP_DEVICE; if it is not set, "cuda" if torch has a
        GPU, otherwise "cpu".
    """

    def __init__(self, *args: Any, device: torch.device | str | None = None, **options: Any) -> None:
        super().__init__(*args, device=default_device() if device is None else device, **options)
