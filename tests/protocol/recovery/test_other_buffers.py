"""P15: a Buffer keeps working after another one of its rank has failed and its caller has been notified."""

from __future__ import annotations

from typing import Any

import pytest

from builds import FABRICS
from cases import BY_NAME
from deep_ep_py.errors import DeepEPError
from harness import Trial, barrier, dispatch_arguments, make_buffer, under_schedules

TRIAL = Trial.of(BY_NAME["uniform"])
ABSENT = 2


@pytest.mark.parametrize("fabric", FABRICS)
def test_after_another_buffer_has_failed(fabric: str) -> None:
    """Repeatedly: each failure and recovery of the other Buffer could leave more behind."""

    def on_each_rank(group: Any) -> None:
        failing, other = (make_buffer(group, TRIAL.case, fabric, timeout=timeout) for timeout in (30.0, 300.0))
        rank = failing.rank
        arguments = dispatch_arguments(TRIAL.work, rank)
        for _ in range(2):
            if rank != ABSENT:
                with pytest.raises(DeepEPError):
                    failing.dispatch(**arguments)
            TRIAL.check_dispatch(rank, other.dispatch(**arguments))
            barrier(group)
            failing.recover()
            TRIAL.check_dispatch(rank, other.dispatch(**arguments))
            TRIAL.check_dispatch(rank, failing.dispatch(**arguments))
            barrier(group)

    under_schedules(4, on_each_rank)
