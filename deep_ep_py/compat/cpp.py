"""What callers import from DeepEP's extension, `deep_ep_cpp`."""

from deep_ep_py import Buffer, Config, EventHandle, topk_idx_t

is_sm90_compiled = Buffer.is_sm90_compiled
get_low_latency_rdma_size_hint = Buffer.get_low_latency_rdma_size_hint

__all__ = ["Config", "EventHandle", "get_low_latency_rdma_size_hint", "is_sm90_compiled", "topk_idx_t"]
