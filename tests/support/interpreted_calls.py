"""Calls of both modes with interpreted kernels, compared with the oracle."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch

import deep_ep_py as deep_ep
import low_latency
import oracle
from cases import Case
from deep_ep_py.base.native import C
from deep_ep_py.testing import run_ranks
from elastic import ElasticTrial
from elastic import round_trip as elastic_round_trip
from harness import HARSH_NIC, Trial, barrier, dispatch_arguments, round_trip

BYTES = {"arena_bytes": 1 << 20, "timeout": 20.0}
NIC = replace(HARSH_NIC, max_bytes=4096, mtu=256)
WIDE_NIC = replace(HARSH_NIC, blocks=32, max_bytes=4096)
"""For low-latency mode, in which a queue holds all rows from one rank to another."""


def normal(ranks: int, seeds: Iterable[int], num_nvl_bytes: int = 1 << 20, blocks: int = 2, **options: Any) -> None:
    """Run a layout, dispatch and combine, and the last two again from the handle."""
    trial = _trial(ranks, options)

    def on_each_rank(group: Any, seed: int) -> None:
        with deep_ep.Buffer(group, num_nvl_bytes, **{**BYTES, **options}) as buffer:
            round_trip(buffer, group.rank(), trial(seed), blocks)

    _run(ranks, seeds, on_each_rank)


def elastic(ranks: int, seeds: Iterable[int], **options: Any) -> None:
    """Run V2's calls in both layouts, with and without a host wait, and again from the handle."""
    tokens = tuple(9 + 4 * rank for rank in range(ranks))
    shape = {name: options.get(name) for name in ("ranks_per_node", "hops")}
    case = Case("ptx", ranks, tokens, hidden=1544, topk=4, experts=4 * ranks, routing="holes", **shape)
    trial = ElasticTrial.of(case, alignment=3)

    def on_each_rank(group: Any, seed: int) -> None:
        del seed
        given = {"arena_bytes": BYTES["arena_bytes"], "num_gpu_timeout_secs": BYTES["timeout"], "nic": NIC, **options}
        with trial.make_buffer(group, **given) as buffer:
            for expanded in (False, True):
                elastic_round_trip(buffer, trial, 2, expanded=expanded, exact=not expanded)

    _run(ranks, seeds, on_each_rank)


def counting(seeds: Iterable[int]) -> None:
    """Run a layout whose tokens fill several blocks."""
    case = Case("ptx", 4, 300, hidden=8, topk=4, experts=16, ranks_per_node=2)

    def on_each_rank(group: Any, seed: int) -> None:
        work, rank = Trial.of(case, seed).work, group.rank()
        expected = oracle.layout(work.topk_idx[rank], case.experts, 4)
        with deep_ep.Buffer(group, 1 << 20, **BYTES, fabric="ibgda", ranks_per_node=2, nic=NIC) as buffer:
            per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(work.topk_idx[rank], case.experts)
        assert per_rank.equal(expected.num_tokens_per_rank)
        assert per_node is not None and per_node.equal(in_rank.view(-1, 2, 2).any(2).sum(0, dtype=torch.int32))
        assert per_expert.equal(expected.num_tokens_per_expert)
        assert in_rank.equal(expected.is_token_in_rank)

    _run(4, seeds, on_each_rank)


def going_on(ranks: int, seeds: Iterable[int], **options: Any) -> None:
    """One rank skips a dispatch; then all recover and continue."""
    trial = _trial(ranks, options)

    def on_each_rank(group: Any, seed: int) -> None:
        rank = group.rank()
        with deep_ep.Buffer(group, 1 << 20, **{**BYTES, **options, "timeout": 1.0}) as buffer:
            round_trip(buffer, rank, trial(seed), 2)
            barrier(group)
            if rank != seed % ranks:
                with pytest.raises(deep_ep.DeepEPError):
                    buffer.dispatch(**dispatch_arguments(trial(seed).work, rank))
            barrier(group)
            buffer.recover()
            round_trip(buffer, rank, trial(seed), 1)

    _run(ranks, seeds, on_each_rank)


def recovering(ranks: int, seeds: Iterable[int], times: int = 4, **options: Any) -> None:
    """Recover again and again, so that the queues of one generation occupy memory that those of another have used."""
    trial = _trial(ranks, options)

    def on_each_rank(group: Any, seed: int) -> None:
        with deep_ep.Buffer(group, 1 << 20, **{**BYTES, **options}) as buffer:
            for _ in range(times):
                round_trip(buffer, group.rank(), trial(seed), 2)
                barrier(group)
                buffer.recover()

    _run(ranks, seeds, on_each_rank)


def going_on_with_low_latency(ranks: int, seeds: Iterable[int], **options: Any) -> None:
    """The same for low-latency mode."""
    sizes = _sizes(ranks)

    def on_each_rank(group: Any, seed: int) -> None:
        work, rank = low_latency.Work.of(sizes, seed), group.rank()
        with _low_latency_buffer(group, **options, timeout=1.0) as buffer:
            low_latency.round_trip(buffer, work)
            barrier(group)
            if rank != seed % ranks:
                with pytest.raises(deep_ep.DeepEPError):
                    low_latency.dispatch(buffer, work, low_latency.BF16)
            barrier(group)
            buffer.recover()
            low_latency.round_trip(buffer, work)

    _run(ranks, seeds, on_each_rank)


def low_latency_calls(ranks: int, seeds: Iterable[int], **options: Any) -> None:
    """Run dispatch and combine, directly and with hooks, with all casts."""
    sizes = _sizes(ranks)

    def on_each_rank(group: Any, seed: int) -> None:
        hooks = seed % 2 == 1 and not options.get("once_per_node")
        with _low_latency_buffer(group, **options) as buffer:
            for cast in low_latency.CASTS.values():
                low_latency.round_trip(buffer, low_latency.Work.of(sizes, seed, twice=0.2), cast, hooks=hooks)

    _run(ranks, seeds, on_each_rank)


def summing_at_nodes(ranks: int, seeds: Iterable[int], **options: Any) -> None:
    """Send rows once to each node and sum results there before they return. The other order gives nearly equal sums."""
    sizes = _sizes(ranks, tokens=34)  # more than the unit of summation

    def on_each_rank(group: Any, seed: int) -> None:
        work, rank = low_latency.Work.of(sizes, seed), group.rank()
        with _low_latency_buffer(group, once_per_node=True, **options) as buffer:
            results = low_latency.dispatch(buffer, work, topk_weights=work.weights[rank])
            low_latency.check_dispatch(work, rank, low_latency.BF16, results)
            combined = buffer.low_latency_combine(work.results[rank], work.topk_idx[rank], None, results[2])[0]
            torch.testing.assert_close(combined, work.combined[rank], rtol=0.05, atol=0.05)

    _run(ranks, seeds, on_each_rank)


def masking(ranks: int, seeds: Iterable[int], **options: Any) -> None:
    """A rank that does not arrive is masked, and the others continue without it."""
    sizes = _sizes(ranks)

    def on_each_rank(group: Any, seed: int) -> None:
        work, gone = low_latency.Work.of(sizes, seed), seed % ranks
        buffer = _low_latency_buffer(group, **options, enable_shrink=True, timeout=1.0)
        low_latency.round_trip(buffer, work)
        barrier(group)
        if group.rank() != gone:
            rest = work.without(gone)
            named = replace(rest, topk_idx=[ids[: len(x)] for ids, x in zip(work.topk_idx, rest.x, strict=True)])
            results = low_latency.dispatch(buffer, named, low_latency.BF16)
            low_latency.check_dispatch(rest, group.rank(), low_latency.BF16, results)
            low_latency.combine(buffer, named, results[2], rest.results[group.rank()])
        barrier(group)
        buffer.destroy()

    _run(ranks, seeds, on_each_rank)


def posting(seeds: Iterable[int]) -> None:
    """Many warps of two blocks post to one queue pair with a small ring."""
    blocks, posters, puts, size = 2, 3, 6, 64

    def on_each_rank(group: Any, seed: int) -> None:
        del seed
        nic = replace(NIC, queues_per_peer=1, nics=1)
        with deep_ep.Buffer(group, 1 << 20, **BYTES, fabric="ibgda", nic=nic) as buffer:
            engine, runtime = buffer._engine, buffer.runtime
            engine.prepare(0, 0, "post")
            data = engine.empty((blocks * posters, size // 8), torch.int64).fill_(1 - group.rank())
            words = engine.empty((blocks * posters,), torch.int64).zero_()
            there = group.all_gather_object([runtime.heap_offset(one.data_ptr()) for one in (data, words)])
            if group.rank() == 0:
                what = {"source": there[0][0], "target": there[1][0], "words": there[1][1]}
                call = C.measure.post(
                    engine.runtime, to=1, posters=posters, puts=puts, bytes=size, blocks=blocks, **what
                )
                runtime.wait(call)
                engine.check_failure(call)
                runtime.retire(call)
                runtime.drain()
            group.barrier()
            if group.rank() == 1:
                assert words.tolist() == [puts * C.SIGNAL_UNIT] * (blocks * posters)
                assert data.eq(1).all()
            group.barrier()

    _run(2, seeds, on_each_rank)


def _trial(ranks: int, options: dict[str, Any]) -> Any:
    tokens = tuple(12 + 5 * rank for rank in range(ranks))
    shape = {name: options.get(name) for name in ("ranks_per_node", "hops")}
    case = Case("ptx", ranks, tokens, hidden=1544, topk=4, experts=4 * ranks, **shape)
    return lambda seed: Trial.of(case, seed)


def _sizes(ranks: int, tokens: int = 6) -> low_latency.Sizes:
    tokens = tuple(tokens + 3 * rank for rank in range(ranks))
    return low_latency.Sizes("ptx", ranks, tokens, max(tokens), 256, 4, 4 * ranks)


def _low_latency_buffer(group: Any, **options: Any) -> deep_ep.Buffer:
    return deep_ep.Buffer(group, num_rdma_bytes=4 << 20, low_latency_mode=True, **{**BYTES, **options})


def _run(ranks: int, seeds: Iterable[int], fn: Any) -> None:
    for seed in seeds:
        C.ptx.watch(True, seed=seed)
        run_ranks(ranks, fn, seed, seed=seed)
