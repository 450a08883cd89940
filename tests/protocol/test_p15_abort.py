"""P15: a rank that fails notifies the others, so that they fail at once, with its reason, instead of waiting for it."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

import deep_ep_py as deep_ep
from builds import FABRICS
from cases import BY_NAME, Case
from deep_ep_py.testing import run_ranks
from harness import Trial, barrier, dispatch_arguments, make_buffer, under_schedules
from native_programs import build_protocol, run

TRIAL = Trial.of(BY_NAME["uniform"])


@pytest.mark.scenarios
def test_abort_words_are_where_hosts_and_kernels_update_them() -> None:
    """A host's store comes between a kernel's looks; one that does not reach the word tells that rank's host."""
    for seed in range(1, 5):
        result = run(build_protocol(), "near part", str(seed))
        assert result.returncode == 0, f"seed {seed}\n{result.stderr}"


@pytest.mark.parametrize("fabric", FABRICS)
def test_the_first_timeout_ends_all_waits(fabric: str) -> None:
    """Rank 0 waits for 1 s, the others for a day. They learn of its failure, and which rank it waited for."""

    def on_each_rank(group: Any) -> Any:
        rank = group.rank()
        buffer = make_buffer(group, TRIAL.case, fabric, timeout=1.0 if rank == 0 else 86400.0)
        error = None
        if rank != 3:
            with pytest.raises(deep_ep.DeepEPError) as info:
                buffer.dispatch(**dispatch_arguments(TRIAL.work, rank))
            error = info.value
        barrier(group)
        return error

    for errors in under_schedules(4, on_each_rank):
        assert isinstance(errors[0], deep_ep.DeepEPTimeout) and errors[0].peer == 3
        for error in errors[1:3]:
            assert not isinstance(error, deep_ep.DeepEPTimeout) and "rank 0" in str(error), repr(error)


def collect(ranks: int, on_each_rank: Any) -> list[list[deep_ep.DeepEPError]]:
    """Run a body that returns what its rank has raised; check that no rank waited until a timeout."""
    runs = under_schedules(ranks, on_each_rank)
    for errors in runs:
        for error in errors:
            assert not isinstance(error, deep_ep.DeepEPTimeout), "peers must be notified of a failure, not time out"
    return runs


def raised(call: Any) -> deep_ep.DeepEPError:
    with pytest.raises(deep_ep.DeepEPError) as info:
        call()
    return info.value


@pytest.mark.parametrize("fabric", FABRICS)
def test_an_exception_in_the_callers_code(fabric: str) -> None:
    """The code of a rank raises between two calls. Leaving the `with` block of the Buffer notifies the others, which
    are waiting for its next call."""

    def on_each_rank(group: Any) -> Any:
        try:
            with make_buffer(group, TRIAL.case, fabric) as buffer:
                TRIAL.check_dispatch(buffer.rank, buffer.dispatch(**dispatch_arguments(TRIAL.work, buffer.rank)))
                barrier(group)  # a peer may still be in the call that has already ended here
                if buffer.rank == 1:
                    raise ZeroDivisionError("of the caller")
                return raised(lambda: buffer.dispatch(**dispatch_arguments(TRIAL.work, buffer.rank)))
        except ZeroDivisionError:
            return None

    for errors in collect(4, on_each_rank):
        assert all("rank 1" in str(error) for error in errors if error is not None), errors


@pytest.mark.parametrize("fabric", FABRICS)
def test_an_exception_inside_a_call(fabric: str) -> None:
    """One rank has no memory for its output in the middle of a dispatch: its peers, which have sent their counts, are
    notified; the rank raises the cause, and afterwards that its Buffer is broken."""

    def on_each_rank(group: Any) -> Any:
        buffer = make_buffer(group, TRIAL.case, fabric)
        arguments = dispatch_arguments(TRIAL.work, buffer.rank)
        if buffer.rank != 1:
            return raised(lambda: buffer.dispatch(**arguments))

        def no_memory(*_: Any) -> Any:
            raise MemoryError("no room for the output")

        buffer._engine.empty = no_memory
        with pytest.raises(MemoryError):
            buffer.dispatch(**arguments)
        assert "no room for the output" in str(raised(lambda: buffer.dispatch(**arguments)))
        return None

    for errors in collect(4, on_each_rank):
        assert all("rank 1" in str(error) for error in errors if error is not None), errors


@pytest.mark.parametrize("drop", [False, True], ids=["destroyed", "dropped"])
@pytest.mark.parametrize("fabric", FABRICS)
def test_a_rank_that_goes_away(fabric: str, drop: bool) -> None:
    """It leaves before the last call of the others, which are notified instead of waiting for it."""

    def on_each_rank(group: Any) -> Any:
        buffer = make_buffer(group, TRIAL.case, fabric, timeout=86400.0)
        rank = buffer.rank
        TRIAL.check_dispatch(rank, buffer.dispatch(**dispatch_arguments(TRIAL.work, rank)))
        error = None
        if rank != 2:
            error = raised(lambda: buffer.dispatch(**dispatch_arguments(TRIAL.work, rank)))
            assert buffer.lost_ranks() == [2]
        elif drop:
            del buffer
        else:
            buffer.destroy()
        barrier(group)
        return error

    for errors in collect(4, on_each_rank):
        assert all("rank 2 has destroyed or dropped its" in str(error) for error in errors if error is not None), errors


@pytest.mark.parametrize("fabric", FABRICS)
def test_a_rank_that_has_finished_may_go(fabric: str) -> None:
    """It may leave at once, while others are still in the call that has ended on it."""

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, TRIAL.case, fabric)
        rank = buffer.rank
        handle = buffer.dispatch(**dispatch_arguments(TRIAL.work, rank))[4]
        TRIAL.check_combine(rank, TRIAL.combine(buffer, rank, handle))
        buffer.destroy()

    under_schedules(4, on_each_rank, freeze=64)


@pytest.mark.parametrize("fabric", FABRICS)
def test_run_ranks_raises_the_cause_and_not_what_followed_from_it(fabric: str) -> None:
    """It raises the exception of rank 2, not the timeout of rank 0, which waits for that rank."""

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, TRIAL.case, fabric)
        if buffer.rank == 2:
            raise ZeroDivisionError("the cause")
        buffer.dispatch(**dispatch_arguments(TRIAL.work, buffer.rank))

    with pytest.raises(ZeroDivisionError, match="the cause") as info:
        run_ranks(4, on_each_rank, seed=1)
    assert isinstance(info.value.rank_exceptions[0], deep_ep.DeepEPError)


@pytest.mark.parametrize("fabric", FABRICS)
def test_abort(fabric: str) -> None:
    """An explicit abort. Both ranks inside a call and ranks that call later are notified."""

    def on_each_rank(group: Any) -> Any:
        buffer = make_buffer(group, TRIAL.case, fabric)
        arguments = dispatch_arguments(TRIAL.work, buffer.rank)
        if buffer.rank == 0:
            buffer.abort()
            barrier(group)
        elif buffer.rank == 1:
            barrier(group)
        error = raised(lambda: buffer.dispatch(**arguments))
        if buffer.rank > 1:
            barrier(group)
        return error

    for errors in collect(4, on_each_rank):
        assert all("rank 0" in str(error) for error in errors), errors


@pytest.mark.parametrize("fabric", FABRICS)
def test_who_has_been_told_tells_the_others(fabric: str) -> None:
    """A failing rank is stopped after it has only notified rank 1. The caller of rank 1 may overwrite its published
    rows as soon as it is told, so by then every rank must know."""

    def on_each_rank(group: Any) -> Any:
        buffer = make_buffer(group, TRIAL.case, fabric, timeout=86400.0)
        arguments = dispatch_arguments(TRIAL.work, buffer.rank)
        if buffer.rank == 0:
            generation, exception, no_peer = 1, 4, (1 << 14) - 1
            word = ctypes.c_uint64.from_address(buffer.runtime.abort_word(1))
            word.value = generation << 32 | exception << 28 | no_peer << 14 | buffer.rank
            barrier(group)
            return None
        error = raised(lambda: buffer.dispatch(**arguments))
        barrier(group)
        return error

    for errors in collect(4, on_each_rank):
        assert all("rank 0 raised an exception" in str(error) for error in errors[1:]), errors


@pytest.mark.parametrize("fabric", FABRICS)
def test_the_same_operation_with_other_arguments(fabric: str) -> None:
    """The rows of one rank have another size. All ranks raise, whichever detects it first."""
    narrow = Trial.of(Case("narrow", TRIAL.case.ranks, TRIAL.case.tokens, hidden=32))

    def on_each_rank(group: Any) -> Any:
        buffer = make_buffer(group, TRIAL.case, fabric)
        work = narrow.work if buffer.rank == 2 else TRIAL.work
        return raised(lambda: buffer.dispatch(**dispatch_arguments(work, buffer.rank)))

    for errors in collect(4, on_each_rank):
        assert any("does not match" in str(error) for error in errors), errors


@pytest.mark.parametrize("fabric", FABRICS)
def test_another_kind_of_operation(fabric: str) -> None:
    """One rank combines while the others dispatch: no wait of either side could ever end. After half a second the ranks
    compare their operations, and all raise."""

    def on_each_rank(group: Any) -> Any:
        buffer = make_buffer(group, TRIAL.case, fabric)
        rank = buffer.rank
        handle = buffer.dispatch(**dispatch_arguments(TRIAL.work, rank))[4]
        if rank == 2:
            return raised(lambda: TRIAL.combine(buffer, rank, handle))
        return raised(lambda: buffer.dispatch(**dispatch_arguments(TRIAL.work, rank)))

    for errors in collect(4, on_each_rank):
        assert any("combine" in str(error) and "dispatch" in str(error) for error in errors), errors


def test_other_buffers_go_on_beside_one_that_was_broken_off() -> None:
    """The other Buffers of a rank ask whether its kernels have left: when they are made, used, or recover."""

    def on_each_rank(group: Any) -> None:
        first, other = (make_buffer(group, TRIAL.case, "peer") for _ in range(2))
        rank = first.rank
        given = dispatch_arguments(TRIAL.work, rank)
        first.dispatch(**given)
        barrier(group)
        first.abort()
        for buffer in (other, make_buffer(group, TRIAL.case, "peer")):
            buffer.check()
            TRIAL.check_dispatch(rank, buffer.dispatch(**given))
            barrier(group)
        other.abort()
        for buffer in (other, first):
            buffer.recover()
            TRIAL.check_dispatch(rank, buffer.dispatch(**given))

    run_ranks(TRIAL.case.ranks, on_each_rank)
