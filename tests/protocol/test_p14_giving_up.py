"""P14: a block gives up as a whole; after that it stores, signals, offers and frees nothing."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

import deep_ep_py as deep_ep
from builds import FABRICS
from cases import BY_NAME
from deep_ep_py.session import setup_ranks
from deep_ep_py.transport.bootstrap.start import exchange_heaps
from harness import Trial, barrier, dispatch_arguments, make_buffer, under_schedules
from native_programs import build_protocol, run

TRIAL = Trial.of(BY_NAME["uniform"])
ABSENT = 2


def fails(call: Any) -> deep_ep.DeepEPError:
    with pytest.raises(deep_ep.DeepEPError) as info:
        call()
    return info.value


def check_failures(errors: list[deep_ep.DeepEPError], phase: str) -> None:
    """Check that the first rank to give up waited for the absent rank, and that the others did too or were notified."""
    timeouts = [error for error in errors if isinstance(error, deep_ep.DeepEPTimeout)]
    assert timeouts, errors
    for error in timeouts:
        assert error.peer == ABSENT and error.rank != ABSENT and phase in error.phase, str(error)
        assert error.seen < error.expected, str(error)
        for part in (f"rank {error.rank}", error.phase, error.kernel, str(error.expected), str(error.seen)):
            assert part in str(error), f"{part!r} is missing in {error}"


@pytest.mark.parametrize("fabric", FABRICS)
def test_a_rank_that_never_calls(fabric: str) -> None:
    def on_each_rank(group: Any) -> Any:
        buffer = make_buffer(group, TRIAL.case, fabric, timeout=30.0)
        error = None
        if buffer.rank != ABSENT:
            error = fails(lambda: buffer.dispatch(**dispatch_arguments(TRIAL.work, buffer.rank)))
        barrier(group)
        return error

    for errors in under_schedules(4, on_each_rank):
        check_failures([error for error in errors if error is not None], "notify")


@pytest.mark.parametrize("blocks", [1, 4])
@pytest.mark.parametrize("arena_bytes", [None, 0], ids=["direct", "rounds"])
@pytest.mark.parametrize("fabric", FABRICS)
def test_a_rank_that_stops_half_way(fabric: str, arena_bytes: int | None, blocks: int) -> None:
    """It has sent its counts but neither offers nor sends rows. Some blocks of the others only have active row streams,
    some wait for it: each block leaves as a whole, no barrier misses a thread, blocks that gave up complete no block
    counter, and results of earlier calls do not change. When the rank comes after all, it fails too."""

    def on_each_rank(group: Any) -> Any:
        buffer = make_buffer(group, TRIAL.case, fabric, timeout=30.0, arena_bytes=arena_bytes)
        rank = buffer.rank
        arguments = dispatch_arguments(TRIAL.work, rank, config=deep_ep.Config(num_sms=blocks))
        kept = buffer.dispatch(**arguments)
        pending = buffer._begin_dispatch(**arguments)
        if rank == ABSENT:
            barrier(group)
        error = fails(pending.finish)
        if rank != ABSENT:
            barrier(group)
        TRIAL.check_dispatch(rank, kept)
        barrier(group)
        return error if rank != ABSENT else None

    for errors in under_schedules(4, on_each_rank):
        check_failures([error for error in errors if error is not None], "")


def test_nothing_is_stored_after_giving_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that comes after the others have failed stores no row, adds to no signal word and frees no region: except
    for the abort words, all heaps stay unchanged, bit by bit."""
    arena_bytes = 1 << 16
    heaps: list[Any] = []

    def remember(*arguments: Any) -> list[Any]:
        heaps[:] = exchange_heaps(*arguments)
        return list(heaps)

    def contents(rank: int) -> torch.Tensor:
        # The first page holds the abort word, the last pages outputs: the late rank allocates its own before it fails.
        ends = [heap.bytes - (arena_bytes if owner == rank else 0) for owner, heap in enumerate(heaps)]
        counts = [(end - 4096) // ctypes.sizeof(ctypes.c_int64) for end in ends]
        spans = [(ctypes.c_int64 * n).from_address(heap.base + 4096) for heap, n in zip(heaps, counts)]
        # A sum instead of a memcpy, which ThreadSanitizer would see: no wait on a word orders this read after the
        # stores that peers have signaled. Here it is enough that the threads of the ranks have met.
        return torch.cat([torch.frombuffer(span, dtype=torch.int64) + 1 for span in spans])

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, TRIAL.case, "peer", timeout=30.0, arena_bytes=arena_bytes)
        rank = buffer.rank
        arguments = dispatch_arguments(TRIAL.work, rank)
        TRIAL.check_dispatch(rank, buffer.dispatch(**arguments))
        pending = buffer._begin_dispatch(**arguments)
        if rank != ABSENT:
            fails(pending.finish)
            barrier(group)
        else:
            barrier(group)
            before = contents(rank)
            fails(pending.finish)
            assert contents(rank).equal(before)
        barrier(group)

    monkeypatch.setattr(setup_ranks, "exchange_heaps", remember)
    under_schedules(4, on_each_rank)


@pytest.mark.parametrize("fabric", FABRICS)
def test_a_rank_that_never_combines(fabric: str) -> None:
    def on_each_rank(group: Any) -> Any:
        buffer = make_buffer(group, TRIAL.case, fabric, timeout=30.0)
        handle = buffer.dispatch(**dispatch_arguments(TRIAL.work, buffer.rank))[4]
        error = fails(lambda: TRIAL.combine(buffer, buffer.rank, handle)) if buffer.rank != ABSENT else None
        barrier(group)
        return error

    for errors in under_schedules(4, on_each_rank):
        check_failures([error for error in errors if error is not None], "")


@pytest.mark.parametrize("fabric", FABRICS)
def test_a_broken_buffer_says_why(fabric: str) -> None:
    """Later calls raise at once and name the first failure; other Buffers are unaffected."""

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, TRIAL.case, fabric, timeout=30.0)
        rank = buffer.rank
        arguments = dispatch_arguments(TRIAL.work, rank)
        handle = buffer.dispatch(**arguments)[4]
        # The absent rank comes late and is told of the failure.
        if rank == ABSENT:
            barrier(group)
        first = fails(lambda: buffer.dispatch(**arguments))
        if rank != ABSENT:
            barrier(group)
        for call in (
            lambda: buffer.dispatch(**arguments),
            lambda: buffer.dispatch(TRIAL.work.x[rank], handle=handle),
            lambda: TRIAL.combine(buffer, rank, handle),
        ):
            assert str(first) in str(fails(call))
        other = make_buffer(group, TRIAL.case, fabric)
        TRIAL.check_dispatch(rank, other.dispatch(**arguments))

    under_schedules(4, on_each_rank)


@pytest.mark.parametrize("fabric", FABRICS)
def test_queued_kernels_leave_at_once(fabric: str) -> None:
    """Calls queued after one that fails start with the abort word set: they leave without waiting, so the last of five
    fails as early as the first."""

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, TRIAL.case, fabric, timeout=30.0)
        rank = buffer.rank
        handle = buffer.dispatch(**dispatch_arguments(TRIAL.work, rank))[4]
        if rank != ABSENT:
            for _ in range(5):
                fails(lambda: TRIAL.combine(buffer, rank, handle, async_finish=True)[2].current_stream_wait())
        barrier(group)

    under_schedules(4, on_each_rank)


@pytest.mark.parametrize("inside", [True, False])
def test_waits_of_some_calls_have_another_bound(inside: bool) -> None:
    """This applies to calls begun in the block; other calls use the bound of the Buffer."""

    def on_each_rank(group: Any) -> Any:
        buffer = make_buffer(group, TRIAL.case, "peer", timeout=30.0)
        arguments, error = dispatch_arguments(TRIAL.work, buffer.rank), None
        with buffer.timeout_of(2.5):
            TRIAL.check_dispatch(buffer.rank, buffer.dispatch(**arguments))
            if inside and buffer.rank != ABSENT:
                error = fails(lambda: buffer.dispatch(**arguments))
        if not inside and buffer.rank != ABSENT:
            error = fails(lambda: buffer.dispatch(**arguments))
        barrier(group)
        return error

    for errors in under_schedules(4, on_each_rank):
        texts = [str(error) for error in errors if isinstance(error, deep_ep.DeepEPTimeout)]
        assert texts and all(f"after {2.5 if inside else 30:g} s" in text for text in texts)


@pytest.mark.scenarios
def test_all_threads_leave_a_barrier_with_the_same_answer() -> None:
    """Regardless of which thread gives up, and when; also the threads of a group that is joined separately."""
    for seed in range(1, 5):
        result = run(build_protocol(), "barriers", str(seed))
        assert result.returncode == 0, f"seed {seed}\n{result.stderr}"
