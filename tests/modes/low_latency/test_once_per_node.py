"""Low-latency rows that go once to each node, and results that come back as one sum per node, against the oracle, bit
by bit, over networks that delay and reorder."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import deep_ep_py as deep_ep
from builds import BLOCK_COUNTS, FABRICS, SCHEDULES, schedules
from deep_ep_py.base.native import C
from deep_ep_py.modes.low_latency.handles import Origin
from deep_ep_py.modes.low_latency.once_per_node import seconds_saved
from deep_ep_py.modes.low_latency.sizes import Sizes as LibrarySizes
from deep_ep_py.testing import run_ranks, sleep
from deep_ep_py.transport.topology.topology import Topology
from harness import barrier, under_schedules
from launches import forked
from low_latency import (
    BF16,
    CASTS,
    Cast,
    Sizes,
    Work,
    check_combine,
    check_dispatch,
    combine,
    dispatch,
    exact_sums,
    make_buffer,
    summed_by_node,
)

NETWORKS = tuple(fabric for fabric in FABRICS if fabric != "peer")


@dataclass(frozen=True)
class Nodes:
    """A case: sizes, and ranks per node."""

    sizes: Sizes
    per_node: int

    @property
    def options(self) -> dict[str, Any]:
        return {"ranks_per_node": self.per_node, "once_per_node": True if self.per_node > 1 else None}


CASES = (
    Nodes(Sizes("2x1", 2, (7, 3), 8, 128, 3, 4), 1),
    Nodes(Sizes("2x2", 4, (70, 33, 0, 64), 70, 128, 4, 8, torch.int32), 2),
    Nodes(Sizes("3x2", 6, (9, 1, 12, 0, 5, 12), 12, 128, 6, 12), 2),
    Nodes(Sizes("2x4", 8, (5, 9, 0, 40, 3, 1, 8, 33), 40, 128, 6, 16), 4),
    Nodes(Sizes("4x2", 8, (5, 9, 0, 4, 3, 1, 8, 3), 9, 128, 8, 16), 2),
    Nodes(Sizes("several puts", 4, (300, 257, 1, 0), 300, 128, 2, 8), 2),
    Nodes(Sizes("2x8", 16, (3, 0, 4, 1) * 4, 4, 128, 8, 32), 8),
)
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.sizes.name)
each_network = pytest.mark.parametrize("fabric", NETWORKS)


def round_trip(buffer: deep_ep.Buffer, work: Work, per_node: int, cast: Cast, hooks: bool, weighted: bool) -> None:
    weights = work.weights[buffer.rank].to(buffer.device) if weighted else None
    results = dispatch(buffer, work, cast, topk_weights=weights, return_recv_hook=hooks)
    if hooks:
        results[4]()
    check_dispatch(work, buffer.rank, cast, results)
    for zero_copy in (False, True):
        x = work.results[buffer.rank]
        if zero_copy:
            buffer.get_next_low_latency_combine_buffer(results[2]).copy_(x)
        if weighted:
            ids = work.topk_idx[buffer.rank]
            combined, _, hook = buffer.low_latency_combine(
                x, ids, None, results[2], zero_copy=zero_copy, return_recv_hook=hooks
            )
        else:
            combined, _, hook = combine(buffer, work, results[2], zero_copy=zero_copy, return_recv_hook=hooks)
        if hooks:
            hook()
        if weighted:
            wanted = summed_by_node(work, buffer.rank, per_node)
            assert torch.equal(combined.view(torch.int16), wanted.view(torch.int16)), buffer.rank
        else:
            check_combine(work, buffer.rank, combined)


def on_each_rank(group: Any, work: Work, case: Nodes, fabric: str, cast: Cast, weighted: bool) -> None:
    with make_buffer(group, work.sizes, fabric, forward_sms=1, **case.options) as buffer:
        for blocks in BLOCK_COUNTS:
            buffer._engine.device.blocks = blocks
            for hooks in (False, True):
                round_trip(buffer, work, case.per_node, cast, hooks, weighted)


@pytest.mark.covers
@each_network
@each_case
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_case(case: Nodes, fabric: str, weighted: bool) -> None:
    work = Work.of(case.sizes, twice=0.2)
    for seed in schedules(max(1, SCHEDULES // 2)):
        run_ranks(case.sizes.ranks, on_each_rank, work, case, fabric, BF16, weighted, seed=seed)


@each_network
@pytest.mark.parametrize("cast", ["fp8", "rounded", "ue8m0"])
def test_cast_rows(cast: str, fabric: str) -> None:
    case = CASES[1]
    run_ranks(4, on_each_rank, Work.of(case.sizes), case, fabric, CASTS[cast], True, seed=3)


@pytest.mark.parametrize("fabric", ["peer", "mixed"])
def test_weights_on_other_ways(fabric: str) -> None:
    """On paths where all ranks or some pairs are mapped and no rows are forwarded."""
    work = Work.of(Sizes("three", 3, (40, 9, 33), 40, 64, 5, 6), twice=0.3)

    def wanted(rank: int) -> torch.Tensor:
        if fabric == "peer":
            return work.combined[rank]
        return summed_by_node(work, rank, 1, together=[peer for peer in range(3) if (rank + peer) % 2 == 0])

    def on_each_rank(group: Any) -> None:
        with make_buffer(group, work.sizes, fabric) as buffer:
            for hooks in (False, True):
                weights = work.weights[buffer.rank]
                results = dispatch(buffer, work, topk_weights=weights, return_recv_hook=hooks)
                if hooks:
                    results[4]()
                check_dispatch(work, buffer.rank, BF16, results)
                x, ids = work.results[buffer.rank], work.topk_idx[buffer.rank]
                combined, _, hook = buffer.low_latency_combine(x, ids, None, results[2], return_recv_hook=hooks)
                if hooks:
                    hook()
                assert torch.equal(combined, wanted(buffer.rank))

    for seed in schedules(SCHEDULES):
        run_ranks(3, on_each_rank, seed=seed)


@each_network
def test_hooks_in_another_order_on_each_rank(fabric: str) -> None:
    """As many calls are open as there are regions; forwarding waits for no hook."""
    work = Work.of(CASES[1].sizes)

    def on_each_rank(group: Any) -> None:
        with make_buffer(group, work.sizes, fabric, regions=3, forward_sms=2, **CASES[1].options) as buffer:
            rank, order = buffer.rank, [(buffer.rank + step) % 3 for step in range(3)]
            weights, ids = work.weights[rank], work.topk_idx[rank]
            open_calls = [dispatch(buffer, work, topk_weights=weights, return_recv_hook=True) for _ in range(3)]
            for call in order:
                open_calls[call][4]()
                check_dispatch(work, rank, BF16, open_calls[call])
            sums = [
                buffer.low_latency_combine(work.results[rank], ids, None, call[2], return_recv_hook=True)
                for call in open_calls
            ]
            for call in order:
                sums[call][2]()
                assert torch.equal(sums[call][0], summed_by_node(work, rank, 2))

    for seed in schedules(SCHEDULES):
        run_ranks(4, on_each_rank, seed=seed)


@each_network
def test_a_call_that_is_begun_waits_for_no_peer(fabric: str) -> None:
    """A call with a hook returns before another rank has begun its call, whose rows are forwarded afterwards."""
    work = Work.of(CASES[1].sizes)

    def on_each_rank(group: Any) -> None:
        with make_buffer(group, work.sizes, fabric, forward_sms=1, **CASES[1].options) as buffer:
            rank = buffer.rank
            weights, x, ids = work.weights[rank], work.results[rank], work.topk_idx[rank]
            for first in range(4):
                results = None
                for turn in (True, False):
                    if (rank == first) is turn:
                        results = dispatch(buffer, work, topk_weights=weights, return_recv_hook=True)
                    barrier(group)
                assert results is not None
                results[4]()
                check_dispatch(work, rank, BF16, results)
                sums = None
                for turn in (True, False):
                    if (rank == first) is turn:
                        sums = buffer.low_latency_combine(x, ids, None, results[2], return_recv_hook=True)
                    barrier(group)
                assert sums is not None
                sums[2]()
                assert torch.equal(sums[0], summed_by_node(work, rank, 2))

    for seed in schedules(max(1, SCHEDULES // 2)):
        run_ranks(4, on_each_rank, seed=seed)


@pytest.mark.once
def test_a_process_forwards_while_it_waits_elsewhere(workers: Path) -> None:
    done = forked(workers / "begun_early.py", 4, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.once
def test_sums_are_within_two_roundings() -> None:
    """The partial sum of each other node and the total are rounded to 8 bits; fp32 adds less than a hundredth."""
    case = CASES[4]
    work = Work.of(case.sizes)

    def on_each_rank(group: Any) -> None:
        with make_buffer(group, work.sizes, "ibgda", **case.options) as buffer:
            rank = buffer.rank
            handle = dispatch(buffer, work, topk_weights=work.weights[rank])[2]
            combined = buffer.low_latency_combine(work.results[rank], work.topk_idx[rank], None, handle)[0].double()
            exact, most = exact_sums(work, rank)
            assert ((combined - exact).abs() <= 1.01 * 2**-8 * (exact.abs() + most)).all()

    run_ranks(8, on_each_rank, seed=1)


# --- the wire -------------------------------------------------------------------------------------------------------


def rows_sent(case: Nodes, once: bool, weighted: bool) -> list[tuple[list[int], list[int]]]:
    """Return by rank the number of rows that go to each peer in a dispatch and in a combine. It follows from the growth
    of the traffic with longer rows; all other traffic only depends on the number of rows.
    """

    narrow = Work.of(case.sizes)

    def bytes_sent(times: int) -> list[list[list[int]]]:
        sizes, x = replace(case.sizes, hidden=times * case.sizes.hidden), [x.repeat(1, times) for x in narrow.x]
        work = Work.on(sizes, x, narrow.topk_idx, narrow.weights, torch.Generator().manual_seed(1))
        options = {**case.options, "once_per_node": once and case.per_node > 1, "nic": deep_ep.NicOptions()}

        def on_each_rank(group: Any) -> list[list[int]]:
            with make_buffer(group, work.sizes, "ibgda", **options) as buffer:
                rank, sent = buffer.rank, []
                weights = work.weights[rank]
                handle = dispatch(buffer, work, topk_weights=weights if weighted else None)[2]
                buffer.runtime.drain()
                sent.append([peer["bytes"] for peer in buffer.network_counters()])
                x, ids = work.results[rank], work.topk_idx[rank]
                buffer.low_latency_combine(x, ids, None if weighted else weights, handle)
                buffer.runtime.drain()
                sent.append([peer["bytes"] for peer in buffer.network_counters()])
                return sent

        return list(run_ranks(case.sizes.ranks, on_each_rank, seed=1))

    rows, row_bytes = [], 2 * case.sizes.hidden
    for few, many in zip(bytes_sent(1), bytes_sent(2), strict=True):
        longer = [[after - before for after, before in zip(*both)] for both in zip(many, few)]
        assert not any(more % row_bytes for peers in longer for more in peers)
        first, both = [[more // row_bytes for more in peers] for peers in longer]
        rows.append((first, [after - before for before, after in zip(first, both)]))
    return rows


def destinations(case: Nodes, of_one: int) -> list[list[int]]:
    """Return by source and destination, each a group of `of_one` consecutive ranks, the tokens that go there, each
    counted once."""
    experts, there = case.sizes.local * of_one, []
    for ids in Work.of(case.sizes).topk_idx:
        to = [{expert // experts for expert in row if expert >= 0} for row in ids.tolist()]
        there.append([sum(place in row for row in to) for place in range(case.sizes.ranks // of_one)])
    return there


@pytest.mark.once
@each_case
def test_a_row_crosses_once_for_each_node(case: Nodes) -> None:
    """It goes to the forwarder there, which sends a sum back; otherwise, a row goes to each rank and a result comes for
    each choice."""
    per_node, ranks = case.per_node, case.sizes.ranks
    to_node, to_rank = destinations(case, per_node), destinations(case, 1)
    packed = Work.of(case.sizes).packed
    summed, single = rows_sent(case, True, True), rows_sent(case, False, False)
    for rank in range(ranks):
        node, place = divmod(rank, per_node)
        far = [peer // per_node != node for peer in range(ranks)]
        through = [far[peer] and peer % per_node == place for peer in range(ranks)]
        there = [to_node[rank][peer // per_node] * through[peer] for peer in range(ranks)]
        back = [to_node[peer][node] * through[peer] for peer in range(ranks)]
        assert summed[rank] == (there, back), rank
        rows = [to_rank[rank][peer] * far[peer] for peer in range(ranks)]
        sources = [source for pairs in packed[rank].pairs for source, _ in pairs]
        results = [sources.count(peer) * far[peer] for peer in range(ranks)]
        assert single[rank] == (rows, results), rank


# --- when -----------------------------------------------------------------------------------------------------------


def crosses_once(buffer: deep_ep.Buffer, sizes: Sizes, hooks: bool = False) -> bool:
    """Return whether the rows of a dispatch go once to each node, that is, to no peer but the forwarders."""
    before = [peer["bytes"] for peer in buffer.network_counters()]
    work = Work.of(sizes, skipped=0)
    results = dispatch(buffer, work, return_recv_hook=hooks)
    if hooks:
        results[4]()
    check_dispatch(work, buffer.rank, BF16, results)
    buffer.runtime.drain()
    sent = [peer["bytes"] - had for peer, had in zip(buffer.network_counters(), before, strict=True)]
    per_node = buffer._engine.topology.ranks_per_node
    row = 2 * sizes.hidden
    others = [
        peer
        for peer in range(sizes.ranks)
        if peer // per_node != buffer.rank // per_node and peer % per_node != buffer.rank % per_node
    ]
    return all(sent[peer] < row for peer in others)


@pytest.mark.once
def test_where_it_pays() -> None:
    """The default: with many tokens, and not with a hook unless blocks may be held for it."""
    few, many = Sizes("few", 4, (1,) * 4, 1, 4096, 4, 4), Sizes("many", 4, (64,) * 4, 64, 4096, 4, 4)
    link = deep_ep.Link(bandwidth=50e9, hop=2e-6)

    def on_each_rank(group: Any) -> None:
        options: dict[str, Any] = {"ranks_per_node": 2, "link": link, "nic": deep_ep.NicOptions()}
        with make_buffer(group, many, "ibgda", **options) as buffer:
            assert (
                not crosses_once(buffer, few)
                and crosses_once(buffer, many)
                and not crosses_once(buffer, many, hooks=True)
            )
        with make_buffer(group, many, "ibgda", forward_sms=1, **options) as buffer:
            assert not crosses_once(buffer, few, hooks=True) and crosses_once(buffer, many, hooks=True)
        with make_buffer(group, many, "ibgda", once_per_node=False, **options) as buffer:
            assert not crosses_once(buffer, many)
        with make_buffer(group, many, "ibgda", enable_shrink=True, **options) as buffer:
            assert not crosses_once(buffer, many)

    run_ranks(4, on_each_rank, seed=1)


@pytest.mark.once
def test_what_handles_keep() -> None:
    """Without weights, Python computes the size too; it must agree with C++."""
    for sizes in (LibrarySizes(70, 128, 4, 8), LibrarySizes(9, 128, 8, 32, 4)):
        for tokens in (0, 1, 9):
            native = C.low_latency.places_words(sizes.native(), ranks=8, tokens=tokens)
            assert Origin.places_words(sizes, 8, tokens) == native


@pytest.mark.once
def test_what_the_wire_saves() -> None:
    """16 ranks in 2 nodes, 128 tokens of 7168 elements, top-8, compared with randomly drawn experts."""
    sizes = LibrarySizes(128, 7168, 8, 256)
    topology = Topology(0, 16, ("peer", "ibgda"), 8, link=deep_ep.Link(bandwidth=50e9))
    random = torch.Generator().manual_seed(1)
    experts = torch.randint(256, (20000, 8), generator=random)
    ranks = sum(len({e // 16 for e in row if e >= 128}) for row in experts.tolist()) / len(experts)
    nodes = sum(any(e >= 128 for e in row) for row in experts.tolist()) / len(experts)
    by_hand = 128 * (ranks - nodes) * 14336 / 50e9
    assert seconds_saved(topology, sizes, use_fp8=False) == pytest.approx(by_hand, rel=0.02)
    assert seconds_saved(topology, sizes, use_fp8=True) == pytest.approx(by_hand / 2, rel=0.02)


@pytest.mark.once
def test_bad_arguments() -> None:
    work = Work.of(CASES[1].sizes)

    def on_each_rank(group: Any) -> None:
        rank = group.rank()
        for options, text in (
            ({"once_per_node": True}, "several nodes of several ranks"),
            ({"once_per_node": True, "ranks_per_node": 1}, "each node has 1 of 4"),
            ({"once_per_node": True, "ranks_per_node": 2, "enable_shrink": True}, "enable_shrink"),
            ({"forward_sms": -1, "ranks_per_node": 2}, "forward_sms=-1"),
            ({"once_per_node": rank == 0, "ranks_per_node": 2}, "once_per_node"),
        ):
            with pytest.raises(ValueError, match=text):
                make_buffer(group, work.sizes, "ibgda", **options)
        with pytest.raises(TypeError, match="once_per_node"):
            make_buffer(group, work.sizes, "ibgda", once_per_node=2, ranks_per_node=2)
        with make_buffer(group, work.sizes, "ibgda", **CASES[1].options) as buffer:
            with pytest.raises(ValueError, match="return_recv_hook=True: expected forward_sms"):
                dispatch(buffer, work, return_recv_hook=True)
            weights = work.weights[rank]
            with pytest.raises(TypeError, match="topk_weights"):
                dispatch(buffer, work, topk_weights=weights.tolist())
            with pytest.raises(ValueError, match="topk_weights"):
                dispatch(buffer, work, topk_weights=weights[:, :2])
            handle = dispatch(buffer, work, topk_weights=weights)[2]
            with pytest.raises(ValueError, match="topk_weights=.*: expected None"):
                combine(buffer, work, handle)
            x, ids = work.results[rank], work.topk_idx[rank]
            with pytest.raises(ValueError, match="use_logfmt"):
                buffer.low_latency_combine(x, ids, None, handle, use_logfmt=True)
            with pytest.raises(ValueError, match="return_recv_hook=True: expected a Buffer with forward_sms"):
                buffer.low_latency_combine(x, ids, None, handle, return_recv_hook=True)
            assert torch.equal(buffer.low_latency_combine(x, ids, None, handle)[0], summed_by_node(work, rank, 2))
            with pytest.raises(TypeError, match="topk_weights"):
                buffer.low_latency_combine(x, ids, None, dispatch(buffer, work)[2])

        with make_buffer(group, work.sizes, "ibgda", ranks_per_node=2, enable_shrink=True) as masking:
            with pytest.raises(ValueError, match="topk_weights: expected None on a Buffer with enable_shrink"):
                dispatch(masking, work, topk_weights=weights)
            with make_buffer(group, work.sizes, "ibgda", **CASES[1].options) as buffer:
                handle = dispatch(buffer, work, topk_weights=weights)[2]
                with pytest.raises(ValueError, match="enable_shrink=True"):
                    masking.low_latency_combine(x, ids, None, handle)
        with pytest.raises(ValueError, match="low_latency_mode=True"):
            deep_ep.Buffer(group, 1 << 20, fabric="ibgda", **CASES[1].options)

    run_ranks(4, on_each_rank, seed=1)


# --- failures -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("late", [1, 2])
@each_network
def test_a_rank_that_does_not_come(fabric: str, late: int) -> None:
    """Also a rank that forwards what another one waits for: the absent rank is named. The next calls fail; after that,
    all works again."""
    work, timeout = Work.of(CASES[1].sizes), 30.0

    def on_each_rank(group: Any) -> None:
        with make_buffer(group, work.sizes, fabric, timeout=timeout, forward_sms=1, **CASES[1].options) as buffer:
            round_trip(buffer, work, 2, BF16, True, True)
            barrier(group)
            if buffer.rank == late:
                sleep(1.5 * timeout)
            with pytest.raises(deep_ep.DeepEPError, match=f"(waited for .* of|too long for) rank {late}"):
                hooks = [dispatch(buffer, work, return_recv_hook=True)[4] for _ in range(2)]
                for hook in hooks:
                    hook()
            with pytest.raises(deep_ep.DeepEPError, match="broken"):
                dispatch(buffer, work)
            buffer.recover()
            round_trip(buffer, work, 2, BF16, False, True)

    under_schedules(4, on_each_rank)


@pytest.mark.parametrize("late", [0, 3])
@each_network
def test_a_rank_that_does_not_combine(fabric: str, late: int) -> None:
    work, timeout = Work.of(CASES[1].sizes), 30.0

    def on_each_rank(group: Any) -> None:
        with make_buffer(group, work.sizes, fabric, timeout=timeout, **CASES[1].options) as buffer:
            rank = buffer.rank
            handle = dispatch(buffer, work, topk_weights=work.weights[rank])[2]
            barrier(group)
            if rank == late:
                sleep(1.5 * timeout)
            with pytest.raises(deep_ep.DeepEPError, match=f"(waited for .* of|too long for) rank {late}"):
                buffer.low_latency_combine(work.results[rank], work.topk_idx[rank], None, handle)
            buffer.recover()
            round_trip(buffer, work, 2, BF16, False, True)

    under_schedules(4, on_each_rank)


@each_network
def test_going_on_without_a_rank(fabric: str) -> None:
    """Rows then go to each rank, and a sum comes from each."""
    gone = 1
    work = Work.of(CASES[1].sizes)
    without = work.without(gone)

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, work.sizes, fabric, forward_sms=1, **CASES[1].options)
        rank = buffer.rank
        round_trip(buffer, work, 2, BF16, True, True)
        group.barrier()
        if rank == gone:
            buffer.destroy()
            group.barrier()
            group.barrier()
            return
        group.barrier()
        buffer.recover([gone])
        for hooks in (False, True):
            weights = without.weights[rank]
            results = dispatch(buffer, without, topk_weights=weights, return_recv_hook=hooks)
            if hooks:
                results[4]()
            check_dispatch(without, rank, BF16, results)
            x, ids = without.results[rank], without.topk_idx[rank]
            combined, _, hook = buffer.low_latency_combine(x, ids, None, results[2], return_recv_hook=hooks)
            if hooks:
                hook()
            near = [peer for peer in range(4) if peer // 2 == rank // 2]
            assert torch.equal(combined, summed_by_node(without, rank, 1, together=near))
        # A graph captured earlier still uses the old layout.
        group.barrier()
        buffer._engine.mask = 0
        with pytest.raises(deep_ep.DeepEPError, match=f"from before (rank|it left out rank) {gone}"):
            dispatch(buffer, without)
        buffer.destroy()

    run_ranks(4, on_each_rank, seed=1)
