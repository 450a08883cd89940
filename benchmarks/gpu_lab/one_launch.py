"""A dispatch and a combine in both modes whose ranks launch together, for profilers, which run kernels one by one."""

from __future__ import annotations

from typing import Any

import click
import torch

from benchmarks.gpu_lab import sizes
from deep_ep_py.testing import run_ranks

TOKENS = 128
TIMEOUT = 60.0
"""Seconds: a profiler runs each kernel several times, and saves memory before."""


def on_each_rank(group: Any) -> None:
    """Make the calls once."""
    import deep_ep_py as deep_ep

    ranks, experts = group.size(), sizes.EXPERTS // sizes.RANKS * group.size()
    hint = deep_ep.Buffer.get_low_latency_rdma_size_hint
    size = hint(TOKENS, sizes.HIDDEN, ranks, experts, num_topk=sizes.TOPK)
    room = deep_ep.Buffer.get_dispatch_config(ranks).get_nvl_buffer_size_hint(2 * sizes.HIDDEN, ranks)
    options = {"low_latency_mode": True, "device": "cuda", "timeout": TIMEOUT}
    with deep_ep.Buffer(group, room, size, **options) as buffer:
        random = torch.Generator().manual_seed(1 + group.rank())
        x = torch.randn(TOKENS, sizes.HIDDEN, generator=random).bfloat16().to(buffer.device)
        topk_weights, topk_idx = torch.rand(TOKENS, experts, generator=random).topk(sizes.TOPK)
        topk_weights, topk_idx = topk_weights.to(buffer.device), topk_idx.to(buffer.device)
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, experts)
        rows, _, _, _, handle, _ = buffer.dispatch(
            x,
            topk_idx=topk_idx,
            topk_weights=topk_weights,
            num_tokens_per_rank=per_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
        )
        buffer.combine(rows, handle)
        packed, _, handle, _, _ = buffer.low_latency_dispatch(x, topk_idx, TOKENS, experts, use_fp8=False)
        buffer.low_latency_combine(packed, topk_idx, topk_weights, handle)


@click.command()
@click.option("--ranks", type=click.IntRange(1, 8), default=sizes.RANKS, show_default=True)
def main(ranks: int) -> None:
    """Make the calls on some ranks."""
    run_ranks(ranks, on_each_rank, device="cuda", one_launch=True)
    print(f"{ranks} ranks have dispatched and combined")


if __name__ == "__main__":
    main()
