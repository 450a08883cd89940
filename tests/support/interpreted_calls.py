"""Calls of both modes whose kernels are interpreted, against the oracle."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import deep_ep_py as deep_ep
import low_latency
from cases import Case
from deep_ep_py.core.native import C
from deep_ep_py.testing import run_ranks
from harness import Trial, round_trip

BYTES = {"arena_bytes": 1 << 20, "timeout": 20.0}


def normal(ranks: int, seeds: Iterable[int], **options: Any) -> None:
    tokens = tuple(12 + 5 * rank for rank in range(ranks))
    shape = {name: options.get(name) for name in ("ranks_per_node", "hops")}
    case = Case("ptx", ranks, tokens, hidden=264, topk=4, experts=4 * ranks, **shape)
    for seed in seeds:
        trial = Trial.of(case, seed)

        def on_each_rank(group: Any, trial: Trial = trial) -> None:
            with deep_ep.Buffer(group, 1 << 20, **BYTES, **options) as buffer:
                round_trip(buffer, group.rank(), trial, 2)

        C.ptx.watch(True, seed=seed)
        run_ranks(ranks, on_each_rank, seed=seed)


def low_latency_calls(ranks: int, seeds: Iterable[int], **options: Any) -> None:
    tokens = tuple(6 + 3 * rank for rank in range(ranks))
    sizes = low_latency.Sizes("ptx", ranks, tokens, max(tokens), 256, 4, 4 * ranks)
    for seed in seeds:
        work = low_latency.Work.of(sizes, seed)
        hooks = seed % 2 == 1 and not options.get("once_per_node")

        def on_each_rank(group: Any, work: Any = work, hooks: bool = hooks) -> None:
            with deep_ep.Buffer(group, num_rdma_bytes=4 << 20, low_latency_mode=True, **BYTES, **options) as buffer:
                for cast in low_latency.CASTS.values():
                    low_latency.round_trip(buffer, work, cast, hooks=hooks)

        C.ptx.watch(True, seed=seed)
        run_ranks(ranks, on_each_rank, seed=seed)
