"""Results that travel as LogFMT, against the oracle, bit by bit, over every fabric; refused arguments."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import deep_ep_py as deep_ep
import logfmt
from builds import BLOCK_COUNTS, BUILD, SCHEDULES, schedules
from deep_ep_py.compat.utils.math import calc_diff
from deep_ep_py.modes.low_latency.sizes import Sizes as CheckedSizes
from deep_ep_py.testing import run_ranks
from harness import barrier, under_schedules
from low_latency import Sizes, Work, check_combine, combine, combined_of, dispatch, make_buffer, round_trip

MIXED = ("peer", "proxy", "ibgda", "mixed")
SIZES = Sizes("logfmt", 3, (9, 40, 0), 40, 256, 4, 6)
CASES = (
    Sizes("one rank", 1, (5,), 8, 128, 2, 4),
    Sizes("two ranks", 2, (7, 3), 8, 128, 3, 4),
    Sizes("four ranks, several units", 4, (70, 33, 0, 64), 70, 128, 4, 8, torch.int32),
    Sizes("few experts", 3, (9, 1, 12), 12, 384, 6, 3),
    Sizes("odd rows", 3, (5, 4, 3), 5, 640, 8, 24, torch.int32),
    Sizes("no tokens at all", 3, (0, 0, 0), 4, 128, 2, 6),
)


def on_each_rank(group: Any, works: tuple[Work, ...], fabric: str) -> None:
    with make_buffer(group, works[0].sizes, fabric) as buffer:
        for blocks in BLOCK_COUNTS:
            buffer._engine.device.blocks = blocks
            for work in works:
                results = dispatch(buffer, work)
                x = work.results[buffer.rank].clone()
                hooks = blocks % 2 == 0
                combined, _, hook = combine(buffer, work, results[2], x, use_logfmt=True, return_recv_hook=hooks)
                x.fill_(torch.nan)  # the view belongs to the caller again
                if hook is not None:
                    hook()
                check_combine(work, buffer.rank, combined)


@pytest.mark.parametrize("fabric", MIXED)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case(case: Sizes, fabric: str) -> None:
    """Messages with groups that stay bfloat16, and messages without, which are shorter."""
    work = Work.of(case, seed=3)
    works = (logfmt.spread(work), logfmt.small(work))
    for seed in schedules(max(1, SCHEDULES // 4)):
        run_ranks(case.ranks, on_each_rank, works, fabric, seed=seed)


@pytest.mark.parametrize("fabric", MIXED)
def test_handles_are_used_again(fabric: str) -> None:
    """With and without LogFMT, in overlapping halves, into `out`, from memory that other ranks see."""
    plain = Work.of(SIZES, seed=4)
    spread = logfmt.spread(plain)
    as_they_are = replace(plain, results=spread.results, combined=exact(spread))

    def on_each_rank(group: Any) -> None:
        with make_buffer(group, SIZES, fabric) as buffer:
            packed, _, handle, _, _ = dispatch(buffer, spread)
            out = torch.full(spread.combined[buffer.rank].shape, torch.nan, dtype=torch.bfloat16)
            combined, event, _ = combine(buffer, spread, handle, out=out, use_logfmt=True, async_finish=True)
            event.current_stream_wait()
            assert combined is out
            check_combine(spread, buffer.rank, out)
            check_combine(as_they_are, buffer.rank, combine(buffer, as_they_are, handle)[0])
            packed.copy_(spread.results[buffer.rank])
            first, _, one = combine(buffer, spread, handle, packed, use_logfmt=True, return_recv_hook=True)
            second, _, other = combine(buffer, as_they_are, handle, packed, return_recv_hook=True)
            packed.fill_(torch.nan)
            other()
            one()
            check_combine(spread, buffer.rank, first)
            check_combine(as_they_are, buffer.rank, second)

    under_schedules(SIZES.ranks, on_each_rank)


def exact(work: Work) -> list[torch.Tensor]:
    return [combined_of(work, rank) for rank in range(work.sizes.ranks)]


@pytest.mark.once
def test_sums_are_near() -> None:
    """The error for normally distributed results, by the measure of DeepEP's test, which allows 9e-4."""
    sizes = Sizes("near", 2, (32, 32), 32, 1024, 4, 8)
    work = logfmt.small(Work.of(sizes, seed=5))
    wanted = exact(work)

    def on_each_rank(group: Any) -> None:
        with make_buffer(group, sizes, "peer") as buffer:
            combined = combine(buffer, work, dispatch(buffer, work)[2], use_logfmt=True)[0]
            assert 0 < calc_diff(combined, wanted[buffer.rank]) < 1e-5

    run_ranks(2, on_each_rank, seed=1)


@pytest.mark.skipif(BUILD == "tsan", reason="messages of mismatched calls overwrite each other: intended races")
@pytest.mark.parametrize("fabric", MIXED)
@pytest.mark.overwrites  # sizes differ, and with them the places of messages
def test_ranks_that_do_not_agree(fabric: str) -> None:
    work = logfmt.spread(Work.of(SIZES, seed=6))

    def on_each_rank(group: Any) -> None:
        with make_buffer(group, SIZES, fabric) as buffer:
            handle = dispatch(buffer, work)[2]
            barrier(group)  # a mismatch also ends calls that a slower rank has not finished
            with pytest.raises(deep_ep.DeepEPError, match="not match"):
                combine(buffer, work, handle, use_logfmt=buffer.rank != 1)
                dispatch(buffer, work)
            buffer.recover()
            round_trip(buffer, Work.of(SIZES))

    under_schedules(SIZES.ranks, on_each_rank)


@pytest.mark.once
def test_what_is_refused() -> None:
    def on_each_rank(group: Any) -> None:
        for sizes, options, message in (
            (
                replace(SIZES, hidden=64),
                {},
                "handle: of rows of 64 elements, expected a multiple of 128 elements with use",
            ),
            (SIZES, {"zero_copy": True}, "use_logfmt=True: expected False with zero_copy=True"),
        ):
            work = Work.of(replace(sizes, ranks=1, tokens=(9,)))
            with make_buffer(group, work.sizes, "peer") as buffer:
                handle = dispatch(buffer, work)[2]
                with pytest.raises(ValueError, match=message):
                    combine(buffer, work, handle, use_logfmt=True, **options)
                check_combine(work, 0, combine(buffer, work, handle)[0])

    run_ranks(1, on_each_rank, seed=1)


@pytest.mark.once
@pytest.mark.parametrize("fabric", ["peer", "ibgda"])
def test_a_buffer_without_room_for_the_words(fabric: str) -> None:
    """A Buffer sized for unconverted results still works for those; the size hint suffices for both."""
    sizes = Sizes("exact", 2, (16, 16), 16, 512, 4, 4)
    work = logfmt.spread(Work.of(sizes, seed=7))
    hint = deep_ep.Buffer.get_low_latency_rdma_size_hint(16, 512, 2, 4, num_topk=4)

    def on_each_rank(group: Any) -> None:
        remote, asked = fabric == "ibgda", CheckedSizes(16, 512, 4, 4)
        bytes_without, bytes_with = (asked.buffer_bytes(2, 2, remote, logfmt=logfmt) for logfmt in (False, True))
        assert bytes_without < bytes_with <= min(hint, bytes_without * 1.02)
        with deep_ep.Buffer(group, 0, bytes_without, low_latency_mode=True, fabric=fabric) as buffer:
            handle = dispatch(buffer, work)[2]
            with pytest.raises(ValueError, match=r"num_rdma_bytes: .* with use_logfmt=True; see get_low_latency"):
                combine(buffer, work, handle, use_logfmt=True)
            combine(buffer, work, handle)
        with deep_ep.Buffer(group, 0, bytes_with, low_latency_mode=True, fabric=fabric) as buffer:
            handle = dispatch(buffer, work)[2]
            check_combine(work, buffer.rank, combine(buffer, work, handle, use_logfmt=True)[0])

    run_ranks(2, on_each_rank, seed=1)


@pytest.mark.once
def test_bytes_between_nodes() -> None:
    """A message whose groups are all cast lacks the space for uncast ones."""
    sizes = Sizes("bytes", 2, (32, 32), 32, 1024, 4, 8)
    work = Work.of(sizes, seed=8)
    sent: dict[str, int] = {}

    def on_each_rank(group: Any) -> None:
        with make_buffer(group, sizes, "ibgda") as buffer:
            handle = dispatch(buffer, work)[2]
            for name, own, cast in (
                ("as they are", work, False),
                ("some stay", logfmt.spread(work), True),
                ("all cast", logfmt.small(work), True),
            ):
                buffer.runtime.drain()
                before = [peer["bytes"] for peer in buffer.network_counters()]
                check = combine(buffer, own, handle, use_logfmt=cast)[0]
                if cast:
                    check_combine(own, buffer.rank, check)
                buffer.runtime.drain()
                after = [peer["bytes"] for peer in buffer.network_counters()]
                if buffer.rank == 0:
                    sent[name] = sum(after) - sum(before)

    run_ranks(2, on_each_rank, seed=1)
    assert sent["some stay"] <= 1.02 * sent["as they are"]
    assert sent["all cast"] <= 0.66 * sent["as they are"]
