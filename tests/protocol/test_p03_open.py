"""P3: operation n is refused while operation n - D is open, regardless of other open operations."""

from __future__ import annotations

from typing import Any

import pytest

import deep_ep_py as deep_ep
from builds import FABRICS
from cases import BY_NAME
from deep_ep_py.modes.normal.operations import CombineArguments, PendingCombine
from harness import Trial, barrier, dispatch_arguments, make_buffer, under_schedules


@pytest.mark.parametrize("regions", [2, 3])
@pytest.mark.parametrize("fabric", FABRICS)
def test_refused_while_its_region_is_open(fabric: str, regions: int) -> None:
    """The rule concerns one operation: with a count of open operations instead, finishing a later one would admit a new
    operation to the region of the first."""
    trial = Trial.of(BY_NAME["uniform"])

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, trial.case, fabric, regions=regions)
        rank = buffer.rank
        arguments = dispatch_arguments(trial.work, rank)
        pending = [buffer._begin_dispatch(**arguments) for _ in range(regions)]
        with pytest.raises(deep_ep.DeepEPError, match=r"\b0\b"):
            buffer._begin_dispatch(**arguments)
        # All but the first are finished: one is open, the one that matters.
        for later in pending[1:]:
            trial.check_dispatch(rank, later.finish())
        with pytest.raises(deep_ep.DeepEPError, match=r"\b0\b"):
            buffer.dispatch(**arguments)
        handle = pending[0].finish()[4]
        # Refused calls took no number and left no trace.
        trial.check_dispatch(rank, buffer.dispatch(**arguments))
        trial.check_combine(rank, trial.combine(buffer, rank, handle))

    under_schedules(4, on_each_rank)


@pytest.mark.parametrize("fabric", FABRICS)
def test_every_kind_of_call_is_refused(fabric: str) -> None:
    trial = Trial.of(BY_NAME["uniform"])

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, trial.case, fabric)
        rank = buffer.rank
        arguments = dispatch_arguments(trial.work, rank)
        handle = buffer.dispatch(**arguments)[4]
        pending = buffer._begin_dispatch(**arguments)
        trial.check_combine(rank, trial.combine(buffer, rank, handle))
        with pytest.raises(deep_ep.DeepEPError, match=r"\b1\b"):
            trial.combine(buffer, rank, handle)
        with pytest.raises(deep_ep.DeepEPError, match=r"\b1\b"):
            buffer.dispatch(trial.work.x[rank], handle=handle)
        trial.check_dispatch(rank, pending.finish())
        trial.check_cached(rank, buffer.dispatch(trial.work.x[rank], handle=handle))

    under_schedules(4, on_each_rank)


@pytest.mark.parametrize("fabric", FABRICS)
def test_open_ends_with_the_last_launch(fabric: str) -> None:
    """Queued calls are not open, however long they run: D + 2 of them without a wait are not refused."""
    trial = Trial.of(BY_NAME["uniform"])

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, trial.case, fabric)
        rank = buffer.rank
        handle = buffer.dispatch(**dispatch_arguments(trial.work, rank))[4]
        queued = [trial.combine(buffer, rank, handle, async_finish=True) for _ in range(4)]
        for results in queued:
            results[2].current_stream_wait()
            trial.check_combine(rank, results)

    under_schedules(4, on_each_rank)


@pytest.mark.parametrize("kind", ["dispatch", "combine"])
@pytest.mark.parametrize("fabric", FABRICS)
def test_a_dropped_operation(fabric: str, kind: str) -> None:
    """An operation that is dropped without being finished runs its remaining steps, or breaks the Buffer and reports
    it. It does not leave the peers waiting for rows that no rank will send."""
    trial = Trial.of(BY_NAME["uniform"])

    def on_each_rank(group: Any) -> bool:
        buffer = make_buffer(group, trial.case, fabric)
        rank = buffer.rank
        arguments = dispatch_arguments(trial.work, rank)
        pending: Any
        if kind == "dispatch":
            pending = buffer._begin_dispatch(**arguments)
        else:
            handle = buffer.dispatch(**arguments)[4]
            barrier(group)  # a peer may still be in the call that has already ended here
            pending = PendingCombine.begin(buffer._engine, CombineArguments(trial.expert.x[rank], handle))
        if rank == 2:
            del pending
        try:
            if rank != 2 and kind == "dispatch":
                trial.check_dispatch(rank, pending.finish())
            elif rank != 2:
                trial.check_combine(rank, pending.finish(), weights=False)
            for _ in range(3):
                trial.check_dispatch(rank, buffer.dispatch(**arguments))
        except deep_ep.DeepEPError as error:
            assert not isinstance(error, deep_ep.DeepEPTimeout), "peers must be notified, not time out"
            return False
        return True

    for survived in under_schedules(4, on_each_rank):
        assert len(set(survived)) == 1, "all ranks must agree on whether the Buffer is broken"


def test_what_has_been_finished_is_not_finished_again() -> None:
    """Neither is an operation begun on a Buffer that has since broken: the cause is named and does not change (P16)."""

    trial = Trial.of(BY_NAME["uniform"])

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, trial.case, "peer", timeout=5.0)
        arguments = dispatch_arguments(trial.work, buffer.rank)
        first, second = (buffer._begin_dispatch(**arguments, finish_later=True) for _ in range(2))
        trial.check_dispatch(buffer.rank, first.finish())
        with pytest.raises(deep_ep.DeepEPError, match="operation 0: it has already been finished"):
            first.finish()
        if buffer.rank == 0:
            third = buffer._begin_dispatch(**arguments, finish_later=True)
            with pytest.raises(deep_ep.DeepEPError) as info:
                second.finish()
            assert "rank 0 gave up in dispatch after 5 s" in str(info.value)
            for finish_again in (third.finish, second.finish, third.finish):
                with pytest.raises(deep_ep.DeepEPError, match="gave up in dispatch after 5 s|already been finished"):
                    finish_again()
            with pytest.raises(deep_ep.DeepEPError, match="gave up in dispatch after 5 s"):
                buffer.check()
        barrier(group)

    under_schedules(4, on_each_rank, count=2)
