"""Results of asynchronous calls when their Buffer breaks: complete ones stay valid, and an error of the simulation is
raised even if no thread waits for the end of a call."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import deep_ep_py as deep_ep
from builds import FABRICS
from cases import BY_NAME
from deep_ep_py.errors import SimtError
from deep_ep_py.testing import run_ranks, sleep
from harness import Trial, barrier, dispatch_arguments, make_buffer, under_schedules

TRIAL = Trial.of(BY_NAME["uniform"])


@pytest.mark.parametrize("end", ["break", "recover", "destroy"])
@pytest.mark.parametrize("fabric", FABRICS)
def test_complete_results_stay_so(fabric: str, end: str) -> None:
    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, TRIAL.case, fabric)
        rank = buffer.rank
        results = buffer.dispatch(**dispatch_arguments(TRIAL.work, rank), async_finish=True)
        sleep(1.0)  # its kernels end meanwhile, and no call checks
        barrier(group)
        if end == "destroy":
            buffer.destroy()
        else:
            buffer.abort()
        if end == "recover":
            buffer.recover()
        results[5].current_stream_wait()
        TRIAL.check_dispatch(rank, results)
        barrier(group)

    under_schedules(4, on_each_rank)


@pytest.mark.once
def test_an_error_of_the_simulation_is_raised_by_the_next_call() -> None:
    """The thread that runs the kernels of a call finds that one has broken a rule. The kernels are gone without having
    reported anything."""

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, BY_NAME["one_rank_alone"], "peer")
        trial = Trial.of(BY_NAME["one_rank_alone"])
        arguments = dispatch_arguments(trial.work, 0)

        def run(job: str, **what: Any) -> Any:
            return getattr(buffer.runtime, job)(**what)

        def drive(job: str, **what: Any) -> Any:
            run(job, **what)
            return SimpleNamespace(done=True, failed=True, result=broken_rule)

        def broken_rule() -> None:
            raise SimtError("a rule of the SIMT machine")

        buffer._engine._driver = SimpleNamespace(drive=drive, run=run)
        buffer.dispatch(**arguments, async_finish=True)
        with pytest.raises(SimtError, match="a rule"):
            buffer.dispatch(**arguments)
        with pytest.raises(deep_ep.DeepEPError, match="broken"):
            buffer.dispatch(**arguments)
        buffer._engine._driver = None

    run_ranks(1, on_each_rank)
