"""P15: a rank that fails tells the others, so they fail at once, with its reason, instead of waiting for it."""

from __future__ import annotations

from typing import Any

import pytest

import deep_ep_py as deep_ep
from builds import FABRICS
from cases import BY_NAME
from harness import Trial, barrier, dispatch_arguments, make_buffer, under_schedules

TRIAL = Trial.of(BY_NAME["uniform"])


@pytest.mark.parametrize("fabric", FABRICS)
def test_the_first_timeout_ends_all_waits(fabric: str) -> None:
    """Rank 0 waits 1 s, the others a day. They learn of rank 0's failure, and whom it waited for."""

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
