"""Runs where the library is installed: a round trip of two ranks on the CPU; prints where its parts are."""

from __future__ import annotations

import json

import torch

import deep_ep_py as deep_ep
from deep_ep_py.base.native import C
from deep_ep_py.base.sources import include_root
from deep_ep_py.testing import ThreadGroup, run_ranks

RANKS, TOKENS, HIDDEN, EXPERTS = 2, 24, 64, 4


def round_trip(group: ThreadGroup) -> None:
    """Dispatch small integers, whose sums are exact in BF16, and combine what arrives."""
    x = ((torch.arange(TOKENS * HIDDEN) + group.rank()) % 17).reshape(TOKENS, HIDDEN).bfloat16()
    first = torch.arange(TOKENS) % EXPERTS
    topk_idx = torch.stack([first, (first + 1) % EXPERTS], dim=1)  # every other token goes to both ranks
    with deep_ep.Buffer(group, num_nvl_bytes=1 << 20) as buffer:
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, EXPERTS)
        rows, _, _, counts, handle, _ = buffer.dispatch(
            x,
            topk_idx=topk_idx,
            topk_weights=torch.ones(topk_idx.shape),
            num_tokens_per_rank=per_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
        )
        combined = buffer.combine(rows, handle)[0]
    assert counts == [TOKENS] * (EXPERTS // RANKS)
    assert torch.equal(combined, x * in_rank.sum(1, keepdim=True))


if __name__ == "__main__":
    run_ranks(RANKS, round_trip, seed=1)
    places = {"package": deep_ep.__file__, "headers": str(include_root())}
    print(json.dumps({**places, "libfabric": C.libfabric_here().refusal}))
