"""P14, P15: the exceptions of a failure lead to the rank at fault, whatever else was waiting meanwhile."""

from __future__ import annotations

import re
from typing import Any

import pytest

import deep_ep_py as deep_ep
from builds import FABRICS
from cases import Case, tight
from deep_ep_py.testing import sleep
from harness import Trial, barrier, dispatch_arguments, make_buffer, under_schedules

RANKS, TOKENS = 4, 40
TIMEOUT = 30.0
LATE = 1
# More chunks than slots: a rank that waits for the late one returns no slots, and others wait for those.
SLOTS = tight(RANKS, 64, 4, 16)
TRIAL = Trial.of(Case("late", RANKS, TOKENS, num_nvl_bytes=SLOTS, arena_bytes=0))


def error_of(call: Any) -> deep_ep.DeepEPError:
    with pytest.raises(deep_ep.DeepEPError) as info:
        call()
    return info.value


@pytest.mark.parametrize("fabric", FABRICS)
def test_the_late_rank_is_named_by_all_others(fabric: str) -> None:
    """They must not name a rank that returns no slots because it waits for the late rank itself."""

    def on_each_rank(group: Any) -> str:
        buffer = make_buffer(group, TRIAL.case, fabric, timeout=TIMEOUT)
        handle = buffer.dispatch(**dispatch_arguments(TRIAL.work, buffer.rank))[4]
        barrier(group)
        if buffer.rank == LATE:
            sleep(1.5 * TIMEOUT)
        text = str(error_of(lambda: TRIAL.combine(buffer, buffer.rank, handle)))
        barrier(group)
        return text

    for texts in under_schedules(RANKS, on_each_rank):
        for rank, text in enumerate(texts):
            blamed = re.search(r"(?:waited for .* of|waited too long for) rank (\d)", text)
            assert blamed is not None and int(blamed[1]) == LATE, (rank, text)
            # If another rank is blamed nevertheless, what that rank waited for leads further.
            assert "was waiting for" not in text or re.search(r"was waiting for: .* of rank \d", text), (rank, text)


def test_a_call_behind_a_failure_says_what_that_one_waited_for() -> None:
    """The host waits for the counts of a dispatch, so this call raises the failure of an earlier one."""

    def on_each_rank(group: Any) -> deep_ep.DeepEPError:
        buffer = make_buffer(group, TRIAL.case, "peer", timeout=TIMEOUT)
        arguments = dispatch_arguments(TRIAL.work, buffer.rank)
        handle = buffer.dispatch(**arguments)[4]
        barrier(group)
        if buffer.rank == LATE:
            sleep(1.5 * TIMEOUT)
            error = error_of(lambda: buffer.dispatch(TRIAL.work.x[LATE], handle=handle))
        else:
            event = buffer.dispatch(TRIAL.work.x[buffer.rank], handle=handle, async_finish=True)[5]
            error = error_of(lambda: buffer.dispatch(**arguments))
            assert str(error) in str(error_of(event.current_stream_wait))
        barrier(group)
        return error

    for errors in under_schedules(RANKS, on_each_rank):
        timeouts = [error for error in errors if isinstance(error, deep_ep.DeepEPTimeout)]
        assert timeouts and all(error.kernel == "cached dispatch" for error in timeouts), errors
