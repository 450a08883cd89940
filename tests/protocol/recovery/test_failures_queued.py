"""P12, P14, P15: an operation queued after a failure never succeeds with garbage, on any rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

import deep_ep_py as deep_ep
import oracle
from builds import FABRICS
from cases import BY_NAME
from deep_ep_py.testing import sleep
from harness import Trial, barrier, dispatch_arguments, make_buffer, under_schedules

TRIAL = Trial.of(BY_NAME["uniform"])
RANKS = TRIAL.case.ranks
TIMEOUT = 30.0
LATE = 1

# The results of combining the rows as they were dispatched.
WEIGHTS = [part.topk_weights for part in TRIAL.received]
ECHO = oracle.combine(TRIAL.received, [len(x) for x in TRIAL.work.x], [part.x for part in TRIAL.received], WEIGHTS)


def end_of(event: Any) -> BaseException | None:
    try:
        event.current_stream_wait()
    except deep_ep.DeepEPError as error:
        return error
    return None


def begin(call: Any) -> Any:
    """Return the results of an asynchronous call, or the exception that it has raised at once."""
    try:
        return call()
    except deep_ep.DeepEPError as error:
        return error


def check_ended_well(rank: int, rows: Any, sums: Sequence[Any]) -> list[BaseException]:
    """Check that each result is right or an exception. Returns the exceptions."""
    errors: list[BaseException] = []
    for results in (rows, *sums):
        error = results if isinstance(results, BaseException) else end_of(results[-1])
        if error is not None:
            errors.append(error)
        elif results is rows:
            TRIAL.check_cached(rank, results)
        else:
            oracle.check_combined(results[0], results[1], ECHO[rank])
    return errors


@pytest.mark.parametrize("late", [1.1, 1.5, 2.5], ids=lambda late: f"{late:g} timeouts late")
@pytest.mark.parametrize("arena_bytes", [None, 0], ids=["direct", "rounds"])
@pytest.mark.parametrize("fabric", FABRICS)
def test_operations_behind_one_that_fails(fabric: str, arena_bytes: int | None, late: float) -> None:
    """A cached dispatch and two combines of its rows are queued at once on every rank, as on a GPU. One rank comes
    after the others have given up: it must not find that their combines have continued with rows that never came."""

    def on_each_rank(group: Any) -> Any:
        buffer = make_buffer(group, TRIAL.case, fabric, timeout=TIMEOUT, arena_bytes=arena_bytes, regions=3)
        rank = buffer.rank
        handle = buffer.dispatch(**dispatch_arguments(TRIAL.work, rank))[4]
        barrier(group)
        if rank == LATE:
            sleep(late * TIMEOUT)
        rows = begin(lambda: buffer.dispatch(TRIAL.work.x[rank], handle=handle, async_finish=True))
        sums = []
        if not isinstance(rows, BaseException):
            sums = [begin(lambda: buffer.combine(rows[0], handle, WEIGHTS[rank], async_finish=True)) for _ in range(2)]
        sleep(4 * TIMEOUT)  # no host checks on them meanwhile
        errors = check_ended_well(rank, rows, sums)
        barrier(group)
        return errors

    for errors in under_schedules(RANKS, on_each_rank):
        assert all(errors), "every rank must be notified"
        assert any(isinstance(error, deep_ep.DeepEPTimeout) for rank in errors for error in rank), errors
