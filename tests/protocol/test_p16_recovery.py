"""P16: after a failure the remaining ranks continue with the same Buffer."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

import deep_ep_py as deep_ep
from builds import FABRICS
from cases import BY_NAME
from deep_ep_py.testing import run_ranks
from harness import Trial, barrier, dispatch_arguments, left_out, make_buffer, round_trip_without, under_schedules

TRIAL = Trial.of(BY_NAME["uniform"])
LOST = 2
REST = left_out(TRIAL, [LOST])


def raised(call: Any, kind: type[BaseException] = deep_ep.DeepEPError) -> BaseException:
    with pytest.raises(kind) as info:
        call()
    return info.value


def fail_in_the_middle(buffer: deep_ep.Buffer, failing: int = 1) -> None:
    """Fail on every rank: one has no memory for its output after the others have sent their counts and more."""
    engine, arguments = buffer._engine, dispatch_arguments(TRIAL.work, buffer.rank)
    if buffer.rank != failing:
        raised(lambda: buffer.dispatch(**arguments))
        return

    def no_memory(*_: Any) -> Any:
        raise MemoryError("no room for the output")

    engine.empty = no_memory
    raised(lambda: buffer.dispatch(**arguments), MemoryError)
    del engine.empty


@pytest.mark.parametrize("arena_bytes", [None, 0], ids=["direct", "rounds"])
@pytest.mark.parametrize("fabric", FABRICS)
def test_all_ranks_go_on(fabric: str, arena_bytes: int | None) -> None:
    """Twice, to show that words, regions and numbers of an earlier generation do no harm; the second time after an odd
    number of operations."""

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, TRIAL.case, fabric, arena_bytes=arena_bytes)
        old = round_trip_without(buffer, buffer.rank, TRIAL, TRIAL)
        for _ in range(2):
            fail_in_the_middle(buffer)
            buffer.recover()
            with pytest.raises(ValueError, match="before"):
                buffer.dispatch(TRIAL.work.x[buffer.rank], handle=old)
            old = round_trip_without(buffer, buffer.rank, TRIAL, TRIAL)
            TRIAL.check_dispatch(buffer.rank, buffer.dispatch(**dispatch_arguments(TRIAL.work, buffer.rank)))
        assert buffer.masked_ranks == []
        buffer.destroy()

    under_schedules(4, on_each_rank)


@pytest.mark.parametrize("arena_bytes", [None, 0], ids=["direct", "rounds"])
@pytest.mark.parametrize("fabric", FABRICS)
def test_a_rank_is_left_out(fabric: str, arena_bytes: int | None) -> None:
    """Its code raises in the middle of an operation, and its Buffer is destroyed. Later the same happens to another
    rank; both stay away."""
    both = left_out(TRIAL, [0, LOST])

    def on_each_rank(group: Any) -> None:
        try:
            with make_buffer(group, TRIAL.case, fabric, arena_bytes=arena_bytes) as buffer:
                arguments = dispatch_arguments(TRIAL.work, buffer.rank)
                pending = buffer._begin_dispatch(**arguments)
                if buffer.rank == LOST:
                    raise ZeroDivisionError("of the caller")
                assert f"rank {LOST}" in str(raised(pending.finish))
                buffer.recover([LOST])
                round_trip_without(buffer, buffer.rank, TRIAL, REST)
                round_trip_without(buffer, buffer.rank, TRIAL, REST)
                barrier(group)  # a peer may still be in the call that has ended here
                if buffer.rank == 0:
                    raise ZeroDivisionError("of the caller")
                raised(lambda: buffer.dispatch(**arguments))
                buffer.recover([0])
                assert buffer.masked_ranks == [0, LOST]
                round_trip_without(buffer, buffer.rank, TRIAL, both)
        except ZeroDivisionError:
            if group.rank() == LOST:
                barrier(group)

    under_schedules(4, on_each_rank)


@pytest.mark.parametrize("fabric", FABRICS)
def test_one_rank_left(fabric: str) -> None:
    alone = left_out(TRIAL, [1, 2, 3])

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, TRIAL.case, fabric)
        if buffer.rank == 0:
            buffer.recover([1, 2, 3])
            round_trip_without(buffer, 0, TRIAL, alone)
        else:
            buffer.destroy()
        barrier(group)

    under_schedules(4, on_each_rank)


def test_different_masks() -> None:
    """The Buffers stay broken until the ranks agree on a mask. A rank that looks late finds the other one at its next
    attempt, with the same mask, and joins it."""

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, TRIAL.case, "peer")
        rank = buffer.rank
        if rank in (0, LOST):
            buffer.destroy()
            barrier(group)
            return
        mask, other, theirs = ([0, LOST], 3, [LOST]) if rank == 1 else ([LOST], 1, [0, LOST])
        try:
            buffer.recover(mask, timeout=5.0)
            assert rank == 1
        except deep_ep.DeepEPError as error:
            told = f"mask={mask}, expected the same on all ranks, rank {other} leaves out {theirs}"
            assert told in str(error) or (rank == 3 and "rank 0 is gone too" in str(error)), error
            arguments = dispatch_arguments(TRIAL.work, rank)
            assert "recover was called" in str(raised(lambda: buffer.dispatch(**arguments)))
            buffer.recover([0, LOST])
        round_trip_without(buffer, rank, TRIAL, left_out(TRIAL, [0, LOST]))
        barrier(group)

    under_schedules(4, on_each_rank)


def test_a_rank_that_could_still_store_is_not_left_out() -> None:
    """The others cannot revoke its access to memory: they report that, and continue with it or once it has left."""

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, TRIAL.case, "peer")
        if buffer.rank != LOST:
            error = raised(lambda: buffer.recover([LOST], timeout=1.0))
            assert f"rank {LOST} is to be left out" in str(error) and "destroyed" in str(error)
        barrier(group)
        if buffer.rank == LOST:
            buffer.destroy()
        else:
            buffer.recover([LOST])
            round_trip_without(buffer, buffer.rank, TRIAL, REST)

    under_schedules(4, on_each_rank)


def test_a_rank_that_does_not_come() -> None:
    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, TRIAL.case, "peer")
        if buffer.rank != LOST:
            assert f"rank {LOST} did not come within 3 s" in str(raised(lambda: buffer.recover(timeout=3.0)))
        barrier(group)

    under_schedules(4, on_each_rank)


@pytest.mark.parametrize("late", [0, 1, 2])
@pytest.mark.parametrize("fabric", FABRICS)
def test_ranks_that_have_made_more_attempts_than_others(fabric: str, late: int) -> None:
    """Some give up before the others come, or while these are in one of the meetings. As soon as all have time, they
    meet."""

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, TRIAL.case, fabric)
        rank = buffer.rank
        for call in range(3):
            hurries = rank != call and (rank + call + late) % 3 != 0
            if rank == call and late:
                barrier(group)
            with contextlib.suppress(deep_ep.DeepEPError):
                buffer.recover(timeout=1e-3 if hurries else 2.0)
            if rank != call or not late:
                barrier(group)
            barrier(group)
        buffer.recover(timeout=86400.0)
        round_trip_without(buffer, rank, TRIAL, TRIAL)

    under_schedules(4, on_each_rank)


@pytest.mark.parametrize("fabric", FABRICS)
def test_a_rank_that_has_made_many_attempts(fabric: str) -> None:
    """Its network is that of generation 5 when others still send to that of generation 1."""

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, TRIAL.case, fabric)
        arguments = dispatch_arguments(TRIAL.work, buffer.rank)
        pending = buffer._begin_dispatch(**arguments)
        if buffer.rank == 1:
            for _ in range(4):
                raised(lambda: buffer.recover(timeout=1e-3))
        barrier(group)
        if buffer.rank != 1:
            raised(pending.finish)
        buffer.recover()
        for _ in range(3):
            round_trip_without(buffer, buffer.rank, TRIAL, TRIAL)

    under_schedules(4, on_each_rank)


@pytest.mark.parametrize("fabric", FABRICS)
def test_a_rank_that_is_well_calls_it(fabric: str) -> None:
    """The others are in a dispatch, which raises; no rank waits until a timeout."""

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, TRIAL.case, fabric, timeout=86400.0)
        if buffer.rank != 1:
            error = raised(lambda: buffer.dispatch(**dispatch_arguments(TRIAL.work, buffer.rank)))
            assert "rank 1" in str(error) and not isinstance(error, deep_ep.DeepEPTimeout)
        buffer.recover()
        round_trip_without(buffer, buffer.rank, TRIAL, TRIAL)

    under_schedules(4, on_each_rank)


def test_outputs_are_withheld_until_then() -> None:
    """Peers may still store into an output that an operation had offered before it broke, even if the caller has
    dropped it; after the recovery its memory is free again."""

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, TRIAL.case, "peer", timeout=30.0)
        pending = buffer._begin_dispatch(**dispatch_arguments(TRIAL.work, buffer.rank))
        # The others have its counts, but its offer never comes.
        if buffer.rank == LOST:
            barrier(group)
        try:
            pending.finish()
        except deep_ep.DeepEPError:
            pass
        else:
            pytest.fail("finished without a rank")
        if buffer.rank != LOST:
            barrier(group)
            assert buffer.runtime.arena_used > 0
        del pending
        assert buffer.runtime.arena_used > 0 or buffer.rank == LOST
        buffer.recover()
        assert buffer.stats()["arena_used"] == 0

    under_schedules(4, on_each_rank)


def test_what_was_begun_before_cannot_be_finished() -> None:
    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, TRIAL.case, "peer")
        pending = buffer._begin_dispatch(**dispatch_arguments(TRIAL.work, buffer.rank))
        buffer.recover()
        assert "before the Buffer recovered" in str(raised(pending.finish))
        del pending
        round_trip_without(buffer, buffer.rank, TRIAL, TRIAL)

    under_schedules(4, on_each_rank)


@pytest.mark.parametrize("told", [False, True])
def test_results_that_a_recovery_voids(told: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Results that a call had returned before its kernels failed are void: the caller of each rank learns it exactly
    once, from an exception or a warning, no matter which rank broke the Buffer."""

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, TRIAL.case, "peer")
        if buffer.rank != 1:
            arguments = dispatch_arguments(TRIAL.work, buffer.rank, num_worst_tokens=TRIAL.max_rows)
            results = buffer.dispatch(**arguments, async_finish=True)
        barrier(group)
        if told and buffer.rank != 1:
            raised(results[5].current_stream_wait)
        buffer.abort()
        buffer.recover()
        round_trip_without(buffer, buffer.rank, TRIAL, TRIAL)

    with caplog.at_level("WARNING"):
        run_ranks(4, on_each_rank)
    warnings = [record.getMessage() for record in caplog.records if "are void" in record.getMessage()]
    ranks = sorted(int(text.split()[1].rstrip(":")) for text in warnings)
    assert ranks == ([] if told else [0, 2, 3]), warnings


def test_an_interrupt_when_the_others_have_recovered() -> None:
    """They are notified at once, in the generation that they have begun."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, TRIAL.case, "peer")
        engine = buffer._engine
        if buffer.rank == 0:
            engine._note_ended = interrupt
            raised(buffer.recover, KeyboardInterrupt)
            del engine._note_ended
        else:
            buffer.recover()
            error = raised(lambda: buffer.dispatch(**dispatch_arguments(TRIAL.work, buffer.rank)))
            assert "rank 0" in str(error) and not isinstance(error, deep_ep.DeepEPTimeout), error
        barrier(group)  # otherwise some would still be in the first recovery
        buffer.recover()
        round_trip_without(buffer, buffer.rank, TRIAL, TRIAL)

    under_schedules(4, on_each_rank)


@pytest.mark.once
@pytest.mark.parametrize(
    ("mask", "kind", "text"),
    [(3, TypeError, "mask=3"), ([4], ValueError, "=4: expected"), (["a"], TypeError, "'a'"), ([0], ValueError, "own")],
)
def test_masks_that_are_none(mask: Any, kind: type[Exception], text: str) -> None:
    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, TRIAL.case, "peer")
        if buffer.rank == 0:
            assert text in str(raised(lambda: buffer.recover(mask), kind))

    under_schedules(4, on_each_rank, count=1)


@pytest.mark.once
def test_not_when_destroyed() -> None:
    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, TRIAL.case, "peer")
        TRIAL.check_dispatch(buffer.rank, buffer.dispatch(**dispatch_arguments(TRIAL.work, buffer.rank)))
        buffer.destroy()
        for call in (buffer.recover, buffer.lost_ranks):
            assert "destroyed" in str(raised(call))

    under_schedules(4, on_each_rank, count=1)
