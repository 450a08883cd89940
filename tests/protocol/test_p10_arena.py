"""P10: outputs come from the arena while there is room; an operation that finds it full uses rounds. On a GPU the arena
then grows, which is tested over a stand-in for the driver.
"""

from __future__ import annotations

import gc
import os
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import deep_ep_py as deep_ep
from cases import Case
from harness import Trial, dispatch_arguments, make_buffer, under_schedules
from launches import forked, on_threads, shared_memory

# Each rank receives 40 rows of 512 bytes.
CASE = Case("arena", ranks=2, tokens=20, hidden=256, topk=2, experts=2)
TRIAL = Trial.of(CASE)
ROOM_FOR_TWO = 60 << 10


def test_full_then_freed() -> None:
    """Outputs that are kept fill the arena; dropped ones make room again."""

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, CASE, "peer", arena_bytes=ROOM_FOR_TWO)

        def dispatch() -> Any:
            results = buffer.dispatch(**dispatch_arguments(TRIAL.work, buffer.rank))
            TRIAL.check_dispatch(buffer.rank, results)
            return results

        def rounds() -> int:
            return buffer.stats()["rounds"]

        kept = [dispatch(), dispatch()]
        assert rounds() == 0
        kept.append(dispatch())
        assert rounds() == 1, "the third output finds the arena full"
        for results in kept:
            TRIAL.check_dispatch(buffer.rank, results)
        del kept[0], results
        kept.append(dispatch())
        assert rounds() == 1, "the fourth takes the place of the first"
        for results in kept:
            TRIAL.check_dispatch(buffer.rank, results)

    under_schedules(2, on_each_rank)


def test_a_view_keeps_its_output() -> None:
    """A single row that the caller holds keeps the whole output from being offered to peers."""

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, CASE, "peer", arena_bytes=ROOM_FOR_TWO)
        row = buffer.dispatch(**dispatch_arguments(TRIAL.work, buffer.rank))[0][17]
        before = row.clone()
        for _ in range(4):
            buffer.dispatch(TRIAL.work.x[buffer.rank] * 2, **{k: v for k, v in arguments(buffer).items() if k != "x"})
        assert row.equal(before)

    def arguments(buffer: Any) -> dict[str, Any]:
        return dispatch_arguments(TRIAL.work, buffer.rank)

    under_schedules(2, on_each_rank)


def test_an_output_larger_than_the_arena() -> None:
    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, CASE, "peer", arena_bytes=1 << 12)
        for _ in range(3):
            results = buffer.dispatch(**dispatch_arguments(TRIAL.work, buffer.rank))
            TRIAL.check_dispatch(buffer.rank, results)
            TRIAL.check_combine(buffer.rank, TRIAL.combine(buffer, buffer.rank, results[4]))
        assert buffer.stats()["rounds"] >= 3

    under_schedules(2, on_each_rank)


def test_a_queued_operation_holds_what_it_touches() -> None:
    """The caller drops the input and output of a call that is still running: no other operation may get their memory
    before the call has ended."""

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, CASE, "peer", arena_bytes=ROOM_FOR_TWO)
        rank = buffer.rank
        handle = buffer.dispatch(**dispatch_arguments(TRIAL.work, rank))[4]
        for _ in range(3):
            buffer.dispatch(TRIAL.work.x[rank] * 2, handle=handle, async_finish=True)
            TRIAL.combine(buffer, rank, handle, async_finish=True)
            TRIAL.check_dispatch(rank, buffer.dispatch(**dispatch_arguments(TRIAL.work, rank)))

    under_schedules(2, on_each_rank)


@pytest.mark.parametrize("arena_bytes", [None, 0], ids=["arena", "ordinary"])
def test_an_interrupted_operation_keeps_its_outputs(arena_bytes: int | None) -> None:
    """Ctrl-C in a wait: the caller has left, but the kernels keep storing until they have seen the abort word."""

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, CASE, "peer", arena_bytes=arena_bytes)
        engine, outputs = buffer._engine, []

        def empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            tensor = type(engine).empty(engine, shape, dtype)
            outputs.append(weakref.ref(tensor))
            return tensor

        def interrupted(*_: Any) -> None:
            group.barrier()  # lets the kernels run
            raise KeyboardInterrupt

        if buffer.rank == 1:
            engine.empty, engine.end_operation = empty, interrupted
            with pytest.raises(KeyboardInterrupt):
                buffer.dispatch(**dispatch_arguments(TRIAL.work, buffer.rank))
            gc.collect()
            assert outputs and all(output() is not None for output in outputs)
            buffer.destroy()
            gc.collect()
            assert all(output() is None for output in outputs)
        else:
            pending = buffer._begin_dispatch(**dispatch_arguments(TRIAL.work, buffer.rank))
            group.barrier()
            with suppress(deep_ep.DeepEPError):  # the kernels of rank 1 may have ended before the interrupt
                pending.finish()

    under_schedules(2, on_each_rank)


# Each is described in tests/support/workers/growing_arena.py.
GROWING = ["grows", "announced_by_the_next", "dropped", "no_more_memory", "little_more_memory", "no_host_waits"]
BETWEEN_PROCESSES = ["all_at_once", "what_suits_all", "cannot_be_handed_over", "cannot_be_mapped"]


@pytest.mark.slow
@pytest.mark.once
def test_an_arena_grows_in_one_process(double: Path, workers: Path, tmp_path: Path) -> None:
    assert on_threads(double, workers / "growing_arena.py", tmp_path / "log").split() == GROWING


@pytest.mark.slow
@pytest.mark.once
def test_an_arena_grows_between_processes(
    double: Path, workers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", os.pathsep.join([str(double), os.environ.get("LD_LIBRARY_PATH", "")]))
    monkeypatch.setenv("DOUBLE_LOG", str(tmp_path / "log"))
    before = shared_memory()
    done = forked(workers / "growing_arena.py", 3, "--processes")
    assert done.returncode == 0, done.stdout + done.stderr
    assert shared_memory() <= before
    assert done.stdout.split() == GROWING + BETWEEN_PROCESSES
