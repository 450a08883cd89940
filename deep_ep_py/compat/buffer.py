"""`deep_ep.Buffer`: deep_ep_py's Buffer, constructed the way callers written for DeepEP do."""

from __future__ import annotations

import os
from typing import Any

import torch

import deep_ep_py
from deep_ep_py import Config, EventHandle, EventOverlap
from deep_ep_py.base.config import QUEUE_PAIRS

__all__ = ["Buffer", "Config", "EventHandle", "EventOverlap", "default_device"]

DEVICE_VARIABLE = "DEEP_EP_DEVICE"


class Buffer(deep_ep_py.Buffer):
    """A `deep_ep_py.Buffer`, on a GPU if there is one, constructed with the arguments of DeepEP 1.2.

    Parameters
    ----------
    group, num_nvl_bytes, num_rdma_bytes, low_latency_mode, num_qps_per_rank, allow_nvlink_for_low_latency_mode,
    allow_mnnvl, use_fabric, explicitly_destroy, enable_shrink, comm
        As in `deep_ep_py.Buffer`.
    device : torch.device or str, optional
        Where tensors live. Default: the environment variable DEEP_EP_DEVICE; if it is not set, "cuda" if torch has a
        GPU, otherwise "cpu".
    **options
        Other arguments of `deep_ep_py.Buffer`.
    """

    def __init__(
        self,
        group: Any,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = QUEUE_PAIRS,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        use_fabric: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: Any = None,
        *,
        device: torch.device | str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            group,
            num_nvl_bytes,
            num_rdma_bytes,
            low_latency_mode,
            num_qps_per_rank,
            allow_nvlink_for_low_latency_mode,
            allow_mnnvl,
            use_fabric,
            explicitly_destroy,
            enable_shrink,
            comm,
            device=default_device() if device is None else device,
            **options,
        )


def default_device() -> str:
    """Return where tensors live if the caller does not say."""
    return os.environ.get(DEVICE_VARIABLE) or ("cuda" if torch.cuda.is_available() else "cpu")
