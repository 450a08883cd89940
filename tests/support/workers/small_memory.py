"""Keeps outputs of dispatches in a Buffer with the default arena: more of them than the arena has room for."""

from __future__ import annotations

import argparse
from typing import Any

import torch

import deep_ep_py as deep_ep
from deep_ep_py.testing import run_ranks

RANKS, TOKENS, HIDDEN = 2, 2048, 7168
RECEIVED = TOKENS * HIDDEN * 2
"""Bytes of the rows that a rank receives in a dispatch: as many as it sends."""


def keep(group: Any, total: int) -> dict[str, int]:
    """Keep outputs of so many bytes, check them, and return the Buffer's counts."""
    buffer = deep_ep.Buffer(group, 64 << 20)
    rank = buffer.rank
    topk_idx = torch.full((TOKENS, 1), 1 - rank)  # all rows go to the other rank
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, RANKS)
    layout = {"num_tokens_per_rank": per_rank, "num_tokens_per_expert": per_expert, "is_token_in_rank": in_rank}
    x = torch.empty(TOKENS, HIDDEN, dtype=torch.bfloat16)
    kept = []
    for turn in range(total // RECEIVED):
        x.fill_(2 * turn + rank)
        kept.append(buffer.dispatch(x, topk_idx=topk_idx, topk_weights=torch.ones(TOKENS, 1), **layout)[0])
    for turn, rows in enumerate(kept):
        assert rows.shape == (TOKENS, HIDDEN) and (rows[:: TOKENS // 8] == 2 * turn + 1 - rank).all(), turn
    counts: dict[str, int] = buffer.stats()
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("megabytes", type=int, help="to keep on each rank")
    total = parser.parse_args().megabytes << 20
    print(run_ranks(RANKS, keep, total)[0])


if __name__ == "__main__":
    main()
