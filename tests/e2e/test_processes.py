"""Ranks as processes that torchrun starts, as a user would run them."""

from __future__ import annotations

from pathlib import Path

import pytest

from builds import BUILD, LONG
from launches import forked, shared_memory, torchrun
from worker_runs import lines_of

FEW = [pytest.param(2, marks=pytest.mark.thorough), 4] if BUILD == "fast" else [2]
SIZES = [2, 4, 8] if LONG and BUILD == "fast" else FEW


@pytest.mark.parametrize("ranks", SIZES)
def test_round_trip(workers: Path, ranks: int) -> None:
    """Each path of the rows, one Buffer after another, because starting the processes takes most of the time."""
    before = shared_memory()
    paths = ("direct", "rounds", "weak", "ibgda", "two_hops", "two_hops_in_chunks")
    done = forked(workers / "round_trip.py", ranks, *(f"--path={path}" for path in paths))
    assert done.returncode == 0, done.stdout + done.stderr
    assert shared_memory() <= before, "processes have left shared memory behind"


@pytest.mark.parametrize("ranks", SIZES)
def test_low_latency_layers(workers: Path, ranks: int) -> None:
    """Also with hooks called by another thread."""
    before = shared_memory()
    fabrics = [f"--fabric={fabric}" for fabric in ("peer", "weak", "ibgda", "mixed")]
    done = forked(workers / "low_latency_layers.py", ranks, *fabrics)
    assert done.returncode == 0, done.stdout + done.stderr
    assert shared_memory() <= before, "processes have left shared memory behind"


@pytest.mark.timed
@pytest.mark.once
@pytest.mark.thorough
def test_calls_that_go_on_while_their_caller_does_not(workers: Path) -> None:
    done = forked(workers / "async_calls.py", 3)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.timed
@pytest.mark.once
@pytest.mark.thorough
def test_handlers_and_collections() -> None:
    """A signal handler may use the Buffer whose wait it interrupts; a Buffer collected in a cycle ends properly."""
    lines_of("handlers_and_collections.py", seconds=90)


@pytest.mark.timed
@pytest.mark.once
@pytest.mark.thorough
def test_interrupted_waits() -> None:
    """An interrupt ends a wait at once: during calls of other threads, after calls in flight, and in destroy."""
    lines_of("interrupted_waits.py", seconds=90)


@pytest.mark.once
def test_hosts_reach_unmapped_ranks_by_the_control_plane_alone() -> None:
    lines_of("control_pages.py", seconds=90)


@pytest.mark.timed
def test_a_process_that_dies(workers: Path) -> None:
    before = shared_memory()
    done = torchrun(workers / "peer_dies.py", 3)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(f"rank {rank} raised" in done.stdout for rank in range(2)), done.stdout + done.stderr
    assert done.stdout.count("because rank 2's process (pid ") == 2, done.stdout
    assert shared_memory() <= before, "processes have left shared memory behind"


@pytest.mark.once
def test_what_one_rank_cannot_make(workers: Path) -> None:
    done = forked(workers / "half_made.py", 2)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.once
def test_ranks_say_how_their_calls_differ(workers: Path) -> None:
    done = forked(workers / "mismatched_calls.py", 3)
    assert done.returncode == 0, done.stdout + done.stderr
