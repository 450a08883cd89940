"""The names that callers import from DeepEP's extension: `deep_ep_cpp`, in V2 `deep_ep._C`."""

import deep_ep_py
from deep_ep_py import Config, EventHandle, topk_idx_t
from deep_ep_py.v1.runtime import Runtime as Buffer

is_sm90_compiled = deep_ep_py.Buffer.is_sm90_compiled
get_low_latency_rdma_size_hint = deep_ep_py.Buffer.get_low_latency_rdma_size_hint

__all__ = ["Buffer", "Config", "EventHandle", "get_low_latency_rdma_size_hint", "is_sm90_compiled", "topk_idx_t"]
