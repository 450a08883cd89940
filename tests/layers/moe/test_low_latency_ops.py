"""The low-latency ops: the values of the Buffer, refused arguments, torch's own checks, compiled layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import logfmt
from deep_ep_py import ops
from deep_ep_py.ops import low_latency
from deep_ep_py.testing import run_ranks
from low_latency import CASTS, Cast, Sizes, Work, check_combine, check_scales, make_buffer

SIZES = Sizes("ops", 3, (9, 40, 0), 40, 128, 4, 6)


def check(work: Work, rank: int, cast: Cast, received: ops.Received) -> None:
    assert torch.equal(received.counts, work.packed[rank].counts())
    for expert, pairs in enumerate(work.packed[rank].pairs):
        if not pairs:
            continue
        sent = torch.stack([work.x[source][token] for source, token in pairs])
        got = received.x[expert, : len(pairs)]
        if not cast.use_fp8:
            assert received.scales is None and torch.equal(got, sent)
            continue
        wanted, scales = cast.of(sent)
        assert received.scales is not None and torch.equal(got.view(torch.uint8), wanted.view(torch.uint8))
        check_scales(received.scales[expert, : len(pairs)], scales)


@pytest.mark.parametrize("cast", CASTS)
def test_values(cast: str) -> None:
    work = Work.of(SIZES)

    def on_each_rank(group: Any) -> None:
        with make_buffer(group, SIZES, "mixed") as buffer:
            rank, name = buffer.rank, ops.register(buffer, f"rank {group.rank()}")
            ids, how = work.topk_idx[rank], CASTS[cast]
            received = ops.low_latency_dispatch(work.x[rank], ids, SIZES.max_tokens, SIZES.experts, name, **how.options)
            check(work, rank, how, received)
            out = ops.low_latency_combine(work.results[rank], ids, work.weights[rank], received.routes, name)
            check_combine(work, rank, out)
            # The routes contain all state: copies of them suffice.
            copies = [tensor.clone() for tensor in received.routes]
            check_combine(
                work, rank, ops.low_latency_combine(work.results[rank], ids, work.weights[rank], copies, name)
            )

    run_ranks(SIZES.ranks, on_each_rank, seed=1)


def test_results_as_logfmt() -> None:
    work = logfmt.spread(Work.of(SIZES))

    def on_each_rank(group: Any) -> None:
        with make_buffer(group, SIZES, "mixed") as buffer:
            rank, name = buffer.rank, ops.register(buffer, f"rank {group.rank()}")
            ids = work.topk_idx[rank]
            routes = ops.low_latency_dispatch(work.x[rank], ids, SIZES.max_tokens, SIZES.experts, name).routes
            given = (work.results[rank], ids, work.weights[rank], routes, name)
            check_combine(work, rank, ops.low_latency_combine(*given, use_logfmt=True))

    run_ranks(SIZES.ranks, on_each_rank, seed=1)


@pytest.mark.once
def test_routes_that_are_refused() -> None:
    sizes = Sizes("one", 1, (5,), 8, 128, 2, 4)
    work = Work.of(sizes)

    def on_each_rank(group: Any) -> None:
        with make_buffer(group, sizes, "peer") as buffer, make_buffer(group, sizes, "peer") as other:
            name, others = ops.register(buffer, "one"), ops.register(other, "other")
            routes = ops.low_latency_dispatch(work.x[0], work.topk_idx[0], 8, 4, name).routes
            for given, group_name, message in (
                (routes[:2], name, "routes=a list of 2: expected the 4 tensors"),
                (routes, others, "routes: expected those of this Buffer"),
                ([routes[0], routes[1][:-1], *routes[2:]], name, r"routes\[1\]=.*: expected int32"),
                ([*routes[:3], routes[3][:-1]], name, r"routes\[3\]=.*: expected int32"),
            ):
                with pytest.raises((ValueError, TypeError), match=message):
                    ops.low_latency_combine(work.results[0], work.topk_idx[0], work.weights[0], given, group_name)

    run_ranks(1, on_each_rank, seed=1)


@pytest.mark.once
@pytest.mark.parametrize("cast", ["bf16", "fp8", "ue8m0"])
def test_torch_finds_nothing_wrong_with_them(cast: str) -> None:
    sizes = Sizes("one", 1, (5,), 8, 640, 2, 4)
    work = Work.of(sizes)

    def on_each_rank(group: Any) -> None:
        with make_buffer(group, sizes, "peer") as buffer:
            name, options = ops.register(buffer, f"checked {cast}"), CASTS[cast].options.values()
            given = (work.x[0], work.topk_idx[0], 8, 4, *options, name)
            tests = ("test_schema", "test_faketensor")
            torch.library.opcheck(low_latency.dispatch_op, given, test_utils=tests)
            routes = low_latency.dispatch_op(*given)[3]
            for use_logfmt in (False, True):
                given = (work.results[0].nan_to_num(), work.topk_idx[0], work.weights[0], routes, use_logfmt, name)
                torch.library.opcheck(low_latency.combine_op, given, test_utils=tests)

    run_ranks(1, on_each_rank, seed=1)
