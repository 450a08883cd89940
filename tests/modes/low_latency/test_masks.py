"""`enable_shrink`: ranks that do not answer are masked, and the others continue with their own data."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import deep_ep_py as deep_ep
from builds import BUILD
from deep_ep_py.base.native import C
from deep_ep_py.testing import run_ranks, sleep
from harness import RETRIES_EXCEEDED, barrier, under_schedules
from low_latency import BF16, CASTS, Sizes, Work, check_dispatch, combine, dispatch, make_buffer, round_trip

pytestmark = pytest.mark.overwrites  # `quiet` does not wait for puts in flight to a masked rank

SIZES = Sizes("masks", 4, (9, 40, 3, 33), 40, 128, 4, 8)
WORK = Work.of(SIZES)
MIXED = ("peer", "proxy", "ibgda", "mixed")
TIMEOUT, GONE = 30.0, 2
# The masked rank finds out at its last look, and discards what it has read.
racing = pytest.mark.skipif(BUILD == "tsan", reason="a working rank is masked and reads rows that others overwrite")
PLAIN_NIC = deep_ep.NicOptions(blocks=64, max_bytes=4096, mtu=256)


def make(group: Any, fabric: str, **options: Any) -> deep_ep.Buffer:
    return make_buffer(group, SIZES, fabric, enable_shrink=True, **{"timeout": TIMEOUT, **options})


def make_with_one_masked(group: Any) -> deep_ep.Buffer:
    """Make a Buffer, use it, and let rank 0 mask one of the others."""
    buffer = make(group, "peer")
    round_trip(buffer, WORK)
    barrier(group)
    if buffer.rank == 0:
        buffer.low_latency_update_mask_buffer(GONE, True)
    barrier(group)
    return buffer


def go_on(buffer: deep_ep.Buffer, *gone: int, rounds: int = 3) -> None:
    """Continue without some ranks. Their experts are still among the choices, but no rows go there or come back."""
    rest, rank = WORK.without(*gone), buffer.rank
    named = replace(rest, topk_idx=[ids[: len(x)] for ids, x in zip(WORK.topk_idx, rest.x, strict=True)])
    for turn in range(rounds):
        cast, hooks = (BF16, CASTS["fp8"])[turn % 2], turn % 3 == 2
        results = dispatch(buffer, named, cast, return_recv_hook=hooks)
        if hooks:
            results[4]()
        check_dispatch(rest, rank, cast, results)
        combined, _, hook = combine(buffer, named, results[2], rest.results[rank], return_recv_hook=hooks)
        if hooks:
            hook()
        assert torch.equal(combined, rest.combined[rank])


def status(buffer: deep_ep.Buffer) -> list[int]:
    tensor = torch.full((SIZES.ranks,), 7, dtype=torch.int32)
    buffer.low_latency_query_mask_buffer(tensor)
    return tensor.nonzero().flatten().tolist()


@pytest.mark.parametrize("fabric", MIXED)
def test_nothing_changes_where_all_answer(fabric: str) -> None:
    def on_each_rank(group: Any) -> None:
        with make(group, fabric) as buffer:
            for hooks in (False, True):
                round_trip(buffer, WORK, hooks=hooks)
            buffer.clean_low_latency_buffer(SIZES.max_tokens, SIZES.hidden, SIZES.experts)
            assert status(buffer) == buffer.masked_ranks == []

    under_schedules(SIZES.ranks, on_each_rank)


@pytest.mark.parametrize("fabric", MIXED)
@pytest.mark.parametrize("where", ["dispatch", "combine", "hook", "clean"])
def test_a_rank_that_does_not_come(fabric: str, where: str) -> None:
    """It sleeps for a long time and then finds that it is masked."""

    def on_each_rank(group: Any) -> None:
        buffer = make(group, fabric)
        round_trip(buffer, WORK)
        barrier(group)
        late = buffer.rank == GONE
        begun = dispatch(buffer, WORK, return_recv_hook=where == "hook") if where in ("combine", "hook") else None
        if late:
            sleep(6 * TIMEOUT)
            with pytest.raises(deep_ep.DeepEPError, match=rf"rank [013] has masked rank {GONE}"):
                if where == "hook":
                    begun[4]()
                round_trip(buffer, WORK)
            with pytest.raises(deep_ep.DeepEPError, match="broken"):
                dispatch(buffer, WORK)
            barrier(group)
            buffer.destroy()
            return
        if where == "clean":
            buffer.clean_low_latency_buffer(SIZES.max_tokens, SIZES.hidden, SIZES.experts)
        elif begun is None:
            go_on(buffer, GONE, rounds=1)
        elif where == "hook":
            begun[4]()  # the sleeping rank has already sent its part of this one
            check_dispatch(WORK, buffer.rank, BF16, begun)
            go_on(buffer, GONE, rounds=1)
        else:
            combined = combine(buffer, WORK, begun[2])[0]
            assert torch.equal(combined, WORK.sums_without(GONE)[buffer.rank])
        assert status(buffer) == buffer.masked_ranks == [GONE]
        go_on(buffer, GONE)
        barrier(group)
        buffer.destroy()

    under_schedules(SIZES.ranks, on_each_rank)


def silent(rank: int, peer: int, after: int, syndrome: int = 0) -> deep_ep.NicOptions:
    return replace(PLAIN_NIC, fault_rank=rank, fault_peer=peer, fault_after=after, fault_syndrome=syndrome)


@pytest.mark.parametrize("late", [0.7, 0.95])
def test_a_rank_that_waits_for_the_lost_one_is_not_masked(late: float) -> None:
    """Requests from rank 2 to rank 0 are lost without an error. Rank 0 begins to wait for them late, when the others,
    which have all they need, already wait for rank 0. Its timeout expires last, and yet rank 2 is the one masked.
    """
    nic = silent(GONE, 0, after=0)

    def on_each_rank(group: Any) -> None:
        buffer = make(group, "ibgda", nic=nic)
        if buffer.rank == 0:
            hook = dispatch(buffer, WORK, return_recv_hook=True)[4]
            sleep(late * TIMEOUT)
            hook()
            assert status(buffer) == [GONE]
        elif buffer.rank != GONE:
            check_dispatch(WORK, buffer.rank, BF16, dispatch(buffer, WORK))
            assert status(buffer) == []
        else:
            with pytest.raises(deep_ep.DeepEPError, match=f"rank 0 has masked rank {GONE}"):
                for _ in range(3):
                    dispatch(buffer, WORK)
            barrier(group)
            buffer.destroy()
            return
        go_on(buffer, GONE)
        assert status(buffer) == [GONE]
        barrier(group)
        buffer.destroy()

    under_schedules(SIZES.ranks, on_each_rank)


@pytest.mark.parametrize("after", [2, 3])
def test_rows_that_do_not_come_are_zeros(after: int) -> None:
    """The routing of rank 2 reaches rank 0, but its rows or their signals do not: the number of rows is unchanged."""

    def on_each_rank(group: Any) -> None:
        buffer = make(group, "ibgda", nic=silent(GONE, 0, after))
        if buffer.rank == GONE:
            with pytest.raises(deep_ep.DeepEPError, match=f"has masked rank {GONE}"):
                for _ in range(3):
                    dispatch(buffer, WORK, CASTS["fp8"])
        elif buffer.rank == 0:
            results = dispatch(buffer, WORK, CASTS["fp8"])
            zeros = replace(WORK, x=[own if rank != GONE else torch.zeros_like(own) for rank, own in enumerate(WORK.x)])
            (rows, scales), counts, handle = results[:3]
            assert torch.equal(counts, WORK.packed[0].counts()) and status(buffer) == [GONE]
            assert torch.equal(handle[1], WORK.packed[0].ranges(SIZES.ranks))
            missing = 0
            for expert, pairs in enumerate(WORK.packed[0].pairs):
                for row, (source, token) in enumerate(pairs):
                    wanted, factors = CASTS["fp8"].of(zeros.x[source][token : token + 1])
                    if source == GONE:
                        missing += 1
                        factors = torch.zeros_like(factors)
                    assert torch.equal(rows[expert, row].view(torch.uint8), wanted[0].view(torch.uint8))
                    assert torch.equal(scales[expert, row], factors[0])
            assert missing > 0
        else:
            check_dispatch(WORK, buffer.rank, CASTS["fp8"], dispatch(buffer, WORK, CASTS["fp8"]))
        if buffer.rank != GONE:
            go_on(buffer, GONE)
        barrier(group)
        buffer.destroy()

    under_schedules(SIZES.ranks, on_each_rank)


@pytest.mark.parametrize("pair", [(GONE, 1), (1, GONE)])
def test_a_queue_pair_that_fails_masks_its_peer(pair: tuple[int, int]) -> None:
    """One rank of the pair is masked; the others continue."""

    def on_each_rank(group: Any) -> None:
        buffer = make(group, "ibgda", nic=silent(*pair, after=9, syndrome=RETRIES_EXCEEDED))
        try:
            for _ in range(40):
                combine(buffer, WORK, dispatch(buffer, WORK)[2])
        except deep_ep.DeepEPError as error:
            assert buffer.rank in pair and f"has masked rank {buffer.rank}" in str(error)
            barrier(group)
        else:
            (gone,) = status(buffer)
            assert gone in pair and buffer.rank != gone
            go_on(buffer, gone)
            barrier(group)
        buffer.destroy()

    under_schedules(SIZES.ranks, on_each_rank)


@pytest.mark.parametrize("fabric", MIXED)
def test_a_rank_that_leaves_is_masked_at_once(fabric: str) -> None:
    def on_each_rank(group: Any) -> None:
        buffer = make(group, fabric, timeout=3600.0)
        round_trip(buffer, WORK)
        barrier(group)
        if buffer.rank != GONE:
            began = C.executor.now_ns()
            go_on(buffer, GONE)
            assert status(buffer) == [GONE] and C.executor.now_ns() - began < 60e9
            barrier(group)
        buffer.destroy()
        if buffer.rank == GONE:
            barrier(group)

    under_schedules(SIZES.ranks, on_each_rank)


@racing
@pytest.mark.parametrize("fabric", MIXED)
def test_a_caller_masks_a_rank(fabric: str) -> None:
    """While all ranks are in calls."""

    def on_each_rank(group: Any) -> None:
        buffer = make(group, fabric, timeout=3600.0)
        if buffer.rank == 0:
            dispatch(buffer, WORK)
            buffer.low_latency_update_mask_buffer(GONE, True)
            assert status(buffer) == [GONE]
            buffer.low_latency_update_mask_buffer(GONE, True)
        if buffer.rank == GONE:
            with pytest.raises(deep_ep.DeepEPError, match=f"rank 0 has masked rank {GONE}"):
                for _ in range(3):
                    dispatch(buffer, WORK)
        else:
            for _ in range(2 if buffer.rank == 0 else 3):
                dispatch(buffer, WORK)
            assert status(buffer) == [GONE]
            go_on(buffer, GONE)
        barrier(group)
        buffer.destroy()

    under_schedules(SIZES.ranks, on_each_rank)


@pytest.mark.parametrize("fabric", MIXED)
def test_recovering_after_a_mask(fabric: str) -> None:
    """Recover without the masked rank; in the new generation another rank can be masked."""
    second = 0

    def on_each_rank(group: Any) -> None:
        buffer = make(group, fabric)
        handle = round_trip(buffer, WORK)
        barrier(group)
        if buffer.rank == GONE:
            buffer.destroy()
            barrier(group)
            return
        go_on(buffer, GONE)
        barrier(group)  # a recovery ends the calls that other ranks are in
        buffer.recover([GONE])
        assert status(buffer) == [GONE]
        with pytest.raises(ValueError, match="since the Buffer recovered"):
            combine(buffer, WORK, handle)
        go_on(buffer, GONE)
        if buffer.rank == second:
            buffer.destroy()
            return
        go_on(buffer, GONE, second)
        assert status(buffer) == [second, GONE]
        buffer.destroy()

    under_schedules(SIZES.ranks, on_each_rank)


@racing
def test_a_masked_rank_breaks_no_other() -> None:
    """It aborts, raises and tries to recover: the others are unaffected."""

    def on_each_rank(group: Any) -> None:
        buffer = make_with_one_masked(group)
        if buffer.rank == GONE:
            buffer.abort()
            with pytest.raises(deep_ep.DeepEPError, match="broken"):
                dispatch(buffer, WORK)
            with pytest.raises(deep_ep.DeepEPError, match="recover"):
                buffer.recover(timeout=TIMEOUT)
        if buffer.rank != GONE:
            go_on(buffer, GONE, rounds=3)
            with pytest.raises(ValueError, match=rf"clean_mask_buffer: ranks \[{GONE}\] are masked: .*recover"):
                buffer.low_latency_clean_mask_buffer()
            go_on(buffer, GONE, rounds=3)
        barrier(group)
        assert buffer.rank == GONE or status(buffer) == [GONE]
        buffer.destroy()

    under_schedules(SIZES.ranks, on_each_rank)


def test_other_failures_still_fail_all() -> None:
    def on_each_rank(group: Any) -> None:
        with make(group, "peer") as buffer:
            with pytest.raises(deep_ep.DeepEPError, match="rank 1"):
                if buffer.rank == 1:
                    buffer.abort()
                for _ in range(3):
                    dispatch(buffer, WORK)
            buffer.recover()
            round_trip(buffer, WORK)
            assert status(buffer) == []

    under_schedules(SIZES.ranks, on_each_rank)


def test_refusals() -> None:
    def on_each_rank(group: Any) -> None:
        with pytest.raises(ValueError, match="enable_shrink=True: expected low_latency_mode=True"):
            deep_ep.Buffer(group, 1 << 20, enable_shrink=True)
        if group.size() > 1:
            two = replace(SIZES, ranks=2)
            with pytest.raises(ValueError, match="enable_shrink=.*: expected the same on all ranks"):
                make_buffer(group, two, "peer", enable_shrink=group.rank() == 0)
            with pytest.raises(ValueError, match="timeout with enable_shrink=.*: expected the same on all ranks"):
                make_buffer(group, two, "peer", enable_shrink=True, timeout=5.0 + group.rank())
        with make_buffer(group, replace(SIZES, ranks=2), "peer") as buffer:
            for call in (
                lambda: buffer.low_latency_update_mask_buffer(1 - buffer.rank, True),
                lambda: buffer.low_latency_query_mask_buffer(torch.zeros(2, dtype=torch.int32)),
                buffer.low_latency_clean_mask_buffer,
            ):
                with pytest.raises(ValueError, match="expected a Buffer that was made with enable_shrink=True"):
                    call()
        with make_buffer(group, replace(SIZES, ranks=2), "peer", enable_shrink=True) as buffer:
            for arguments, error, text in (
                ((2, True), ValueError, "rank_to_mask=2: expected 0 to 1"),
                ((buffer.rank, True), ValueError, "expected a rank other than"),
                ((1 - buffer.rank, False), ValueError, "mask=False: expected True: .*recover"),
                ((1 - buffer.rank, 2), TypeError, "mask=2: expected .*bool"),
            ):
                with pytest.raises(error, match=text):
                    buffer.low_latency_update_mask_buffer(*arguments)
            with pytest.raises(ValueError, match=r"mask_status=.*: expected .*\[2\]"):
                buffer.low_latency_query_mask_buffer(torch.zeros(3, dtype=torch.int32))
            buffer.low_latency_clean_mask_buffer()  # no rank is masked
            for name in ("dispatch", "combine"):
                with pytest.raises(ValueError, match=f"{name}: expected a Buffer with enable_shrink=False"):
                    getattr(buffer, name)(torch.zeros((1, 64), dtype=torch.bfloat16), handle=None)
            assert buffer.masked_ranks == []

    run_ranks(2, on_each_rank, seed=1)


@pytest.mark.parametrize("syndrome", [0, RETRIES_EXCEEDED])
def test_a_rank_that_is_cut_off_masks_no_other(syndrome: int) -> None:
    """Everything that one rank sends is lost, with or without errors: whatever its number, that rank is masked."""

    def on_each_rank(group: Any, lost: int) -> Any:
        buffer = make(group, "ibgda", nic=silent(lost, -1, after=9, syndrome=syndrome))
        try:
            for _ in range(10):
                combine(buffer, WORK, dispatch(buffer, WORK)[2])
            return buffer.masked_ranks
        except deep_ep.DeepEPError as error:
            return str(error)
        finally:
            barrier(group)
            buffer.destroy()

    for lost in (0, 3):
        for seed in (1, 2):
            found = run_ranks(SIZES.ranks, on_each_rank, lost, seed=seed)
            assert f"has masked rank {lost}" in found[lost]
            assert all(masked == [lost] for rank, masked in enumerate(found) if rank != lost)


@pytest.mark.parametrize("late", [0.01, 0.3])
def test_a_rank_that_waits_for_its_region_is_not_masked(late: float) -> None:
    """The `free` of rank 2 does not reach rank 0, and rank 2 sends nothing more. Rank 0 enters the next call slightly
    later than ranks 1 and 3, which wait for it and report so, and yet rank 2 is the one that is masked.
    """

    def on_each_rank(group: Any) -> None:
        buffer = make(group, "ibgda", regions=1, nic=silent(GONE, 0, after=4))
        check_dispatch(WORK, buffer.rank, BF16, dispatch(buffer, WORK))
        if buffer.rank == GONE:
            sleep(6 * TIMEOUT)
            with pytest.raises(deep_ep.DeepEPError, match=f"has masked rank {GONE}"):
                dispatch(buffer, WORK)
        else:
            if buffer.rank == 0:
                sleep(late * TIMEOUT)
            go_on(buffer, GONE, rounds=1)
            assert status(buffer) == [GONE]
        barrier(group)
        buffer.destroy()

    under_schedules(SIZES.ranks, on_each_rank)


def test_an_island() -> None:
    """One rank reaches none of the others, which are absent for long: its waits end, and it continues alone."""

    def on_each_rank(group: Any) -> None:
        buffer = make(group, "ibgda", nic=silent(3, -1, after=4, syndrome=RETRIES_EXCEEDED))
        if buffer.rank == 3:
            for _ in range(4):
                dispatch(buffer, WORK)
            assert status(buffer) == [0, 1, 2]
        else:
            sleep(20 * TIMEOUT)
            with pytest.raises(deep_ep.DeepEPError, match=f"rank 3 has masked rank {buffer.rank}"):
                dispatch(buffer, WORK)
        barrier(group)
        buffer.destroy()

    under_schedules(SIZES.ranks, on_each_rank)


@racing
def test_a_masked_rank_that_recovers_with_calls_queued() -> None:
    def on_each_rank(group: Any) -> None:
        buffer = make_with_one_masked(group)
        if buffer.rank == GONE:
            dispatch(buffer, WORK, async_finish=True)
            with pytest.raises(deep_ep.DeepEPError, match="recover: rank . did not come"):
                buffer.recover(timeout=5.0)
        else:
            go_on(buffer, GONE, rounds=6)
            assert status(buffer) == [GONE]
        barrier(group)
        buffer.destroy()

    under_schedules(SIZES.ranks, on_each_rank)


@racing
def test_masks_are_told_in_every_generation() -> None:
    def on_each_rank(group: Any) -> None:
        buffer = make(group, "peer")
        round_trip(buffer, WORK)
        for number, gone in enumerate((3, 2)):
            barrier(group)
            if buffer.rank == 0:
                buffer.low_latency_update_mask_buffer(gone, True)
            barrier(group)
            sleep(1.0)
            if buffer.rank < gone:
                assert gone in buffer.masked_ranks
            if buffer.rank == gone:
                buffer.destroy()
            barrier(group)
            if buffer.rank < gone and number == 0:
                buffer.recover([gone])
        barrier(group)
        buffer.destroy()
        assert buffer.masked_ranks == ([] if buffer.rank == 3 else [3])

    under_schedules(SIZES.ranks, on_each_rank)


@racing
@pytest.mark.parametrize("fabric", ["weak", "ibgda", "mixed"])
def test_a_mask_in_the_middle_of_a_send(fabric: str) -> None:
    """Threads of a block may see the mask at different times: their joint steps must not depend on it."""

    def on_each_rank(group: Any) -> None:
        buffer = make(group, fabric)
        rank, handle = buffer.rank, dispatch(buffer, WORK)[2]
        barrier(group)
        try:
            if rank == 0:
                combined, _, hook = combine(buffer, WORK, handle, return_recv_hook=True)
                buffer.low_latency_update_mask_buffer(3, True)
                hook()
            else:
                combined = combine(buffer, WORK, handle)[0]
        except deep_ep.DeepEPError as error:
            assert rank == 3 and "has masked rank 3" in str(error)
        else:
            assert any(torch.equal(combined, sums[rank]) for sums in (WORK.combined, without))
        barrier(group)
        buffer.destroy()

    without = WORK.sums_without(3)
    for seed in (*range(8), 46):
        run_ranks(SIZES.ranks, on_each_rank, seed=seed)
