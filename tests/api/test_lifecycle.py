"""Several Buffers, one after another and at the same time; Buffers that are dropped while others stay."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import deep_ep_py as deep_ep
import oracle
from builds import FABRICS
from cases import BY_NAME
from deep_ep_py.testing import run_ranks
from harness import Trial, as_received, dispatch_arguments, make_buffer, round_trip, under_schedules
from launches import forked, shared_memory

TRIALS = [Trial.of(BY_NAME["uniform"], 1), Trial.of(BY_NAME["uneven_tokens"], 2)]


@pytest.mark.parametrize("fabric", FABRICS)
def test_two_buffers_take_turns(fabric: str) -> None:
    """Also with an open operation on each, of which the later one ends first."""

    def on_each_rank(group: Any) -> None:
        buffers = [make_buffer(group, trial.case, fabric) for trial in TRIALS]
        rank = buffers[0].rank
        pairs = list(zip(buffers, TRIALS, strict=True))
        for buffer, trial in pairs:
            round_trip(buffer, rank, trial, 2)
        pending = [buffer._begin_dispatch(**dispatch_arguments(trial.work, rank)) for buffer, trial in pairs]
        for which in (1, 0):
            TRIALS[which].check_dispatch(rank, pending[which].finish())

    under_schedules(4, on_each_rank, count=3)


@pytest.mark.parametrize("fabric", FABRICS)
def test_a_buffer_that_one_rank_drops(fabric: str) -> None:
    """Calls of the other ranks that do not need that rank still succeed, and results they have stay valid."""

    def on_each_rank(group: Any) -> None:
        trial = TRIALS[0]
        buffer = make_buffer(group, trial.case, fabric)
        rank = buffer.rank
        # Without the handle, which keeps the Buffer alive.
        received = as_received(buffer.dispatch(**dispatch_arguments(trial.work, rank)))
        if rank == 1:
            del buffer
            gc.collect()
        group.barrier()
        oracle.check_received(received, trial.received[rank])
        buffer = make_buffer(group, trial.case, fabric)
        round_trip(buffer, rank, trial, 2)

    run_ranks(4, on_each_rank, seed=1)


@pytest.mark.slow
@pytest.mark.once
@pytest.mark.thorough
def test_many_buffers_of_processes(workers: Path) -> None:
    before = shared_memory()
    done = forked(workers / "many_buffers.py", 4, teardown=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert shared_memory() <= before, "processes have left shared memory behind"


@pytest.mark.slow
@pytest.mark.once
@pytest.mark.parametrize("how", ["destroy", "exit", "recover"])
def test_another_thread_is_in_a_call(workers: Path, how: str) -> None:
    """The call ends before what it uses: with results, or with an error."""
    done = forked(workers / "ended_by_another_thread.py", 2, how)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(f"ended by {how}\n") == 2


def test_a_destroyed_buffer_lets_go_of_its_group() -> None:
    """torch may abort a process at exit if something still holds a process group."""

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, BY_NAME["two_ranks"], "peer")
        assert buffer.group is group
        buffer.destroy()
        assert buffer.group is None
        buffer.destroy()

    run_ranks(2, on_each_rank)


@pytest.mark.once
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps], ids=["copy", "deepcopy", "pickle"])
def test_it_is_not_copied(copied: Callable[[Any], Any]) -> None:
    """Nor is a model that holds one; the message says how a model does without."""

    def on_each_rank(group: Any) -> None:
        with (
            make_buffer(group, TRIALS[0].case, "peer") as buffer,
            deep_ep.ElasticBuffer(group, num_max_tokens_per_rank=8, hidden=64, num_topk=2) as elastic,
        ):
            model = torch.nn.Linear(2, 2)
            model.held = elastic  # type: ignore[assignment]
            for one in (buffer, elastic, *([model] if copied is not copy.copy else [])):
                with pytest.raises(TypeError, match="Buffer: cannot be copied or pickled.*ops.register"):
                    copied(one)

    run_ranks(4, on_each_rank)


@pytest.mark.slow
@pytest.mark.once
@pytest.mark.parametrize("thread", ["daemon", "joined"])
def test_a_process_exits_beside_a_thread_that_calls(workers: Path, thread: str) -> None:
    """Python ends daemon threads in a way that aborts the process if one of them is inside native code."""
    done = forked(workers / "exits_inside_a_call.py", 2, thread, teardown=True)
    assert done.returncode == 0, done.stdout + done.stderr
    if thread == "daemon":
        assert "rank 0 gave up in dispatch" in done.stdout, done.stdout
    else:
        assert [done.stdout.count(f"call {call} is right") for call in range(2)] == [2, 2], done.stdout
