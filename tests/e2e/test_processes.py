"""Ranks as processes, started by torchrun as a user would."""

from __future__ import annotations

from pathlib import Path

import pytest

from builds import BUILD, LONG
from launches import shared_memory, torchrun
from worker_runs import lines_of

SIZES = ([2, 4, 8] if LONG else [2, 8]) if BUILD == "fast" else [2]


@pytest.mark.parametrize("ranks", SIZES)
def test_round_trip(workers: Path, ranks: int) -> None:
    """Every way of rows, one Buffer after the other: most of the time goes into starting the processes."""
    before = shared_memory()
    paths = ("direct", "rounds", "weak", "ibgda", "two_hops", "two_hops_in_chunks")
    done = torchrun(workers / "round_trip.py", ranks, *(f"--path={path}" for path in paths))
    assert done.returncode == 0, done.stdout + done.stderr
    assert shared_memory() <= before, "processes have left shared memory behind"


@pytest.mark.parametrize("ranks", SIZES)
def test_low_latency_layers(workers: Path, ranks: int) -> None:
    """Also with hooks that another thread calls."""
    before = shared_memory()
    fabrics = [f"--fabric={fabric}" for fabric in ("peer", "weak", "ibgda", "mixed")]
    done = torchrun(workers / "low_latency_layers.py", ranks, *fabrics)
    assert done.returncode == 0, done.stdout + done.stderr
    assert shared_memory() <= before, "processes have left shared memory behind"


@pytest.mark.timed
@pytest.mark.once
def test_calls_that_go_on_while_their_caller_does_not(workers: Path) -> None:
    done = torchrun(workers / "async_calls.py", 3)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.timed
@pytest.mark.once
def test_handlers_and_collections() -> None:
    """A signal's handler may use a Buffer in whose wait it comes; one that is collected in a cycle ends in order."""
    lines_of("handlers_and_collections.py", seconds=90)


@pytest.mark.timed
@pytest.mark.once
def test_interrupted_waits() -> None:
    """An interrupt ends a wait at once, beside other threads' calls, behind calls on their way, and in destroy."""
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
    done = torchrun(workers / "half_made.py", 2)
    assert done.returncode == 0, done.stdout + done.stderr
