"""Ranks as processes, started by torchrun as a user would."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from builds import BUILD, SANITIZED
from worker_runs import lines_of

pytestmark = pytest.mark.processes

SIZES = [2] if SANITIZED else [2, 4, 8]


def shared_memory() -> set[str]:
    """Name the shared memory that lies around; torchrun's own semaphores come and go."""
    directory = Path("/dev/shm")
    names = {path.name for path in directory.iterdir()} if directory.is_dir() else set()
    return {name for name in names if not name.startswith("sem.")}


def torchrun(script: Path, ranks: int, *arguments: str, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    """Run a worker script on `ranks` processes of the build under test and return what became of it."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={ranks}",
        str(script),
        *arguments,
    ]
    paths = [str(Path(__file__).parent), str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "DEEP_EP_BUILD": BUILD,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)


@pytest.mark.parametrize("ranks", SIZES)
def test_round_trip(workers: Path, ranks: int) -> None:
    """Every way of rows, one Buffer after the other: most of the time goes into starting the processes."""
    before = shared_memory()
    done = torchrun(workers / "round_trip.py", ranks, "--path=direct", "--path=rounds", "--path=weak", "--path=ibgda")
    assert done.returncode == 0, done.stdout + done.stderr
    assert shared_memory() <= before, "processes have left shared memory behind"


@pytest.mark.once
def test_calls_that_go_on_while_their_caller_does_not(workers: Path) -> None:
    done = torchrun(workers / "async_calls.py", 3)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.once
def test_handlers_and_collections() -> None:
    """A signal's handler may use a Buffer in whose wait it comes; one that is collected in a cycle ends in order."""
    lines_of("handlers_and_collections.py", seconds=90)


@pytest.mark.once
def test_interrupted_waits() -> None:
    """An interrupt ends a wait at once, beside other threads' calls, behind calls on their way, and in destroy."""
    lines_of("interrupted_waits.py", seconds=90)


def test_a_process_that_dies(workers: Path) -> None:
    before = shared_memory()
    done = torchrun(workers / "peer_dies.py", 3)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(f"rank {rank} raised" in done.stdout for rank in range(2)), done.stdout + done.stderr
    assert done.stdout.count("because rank 2's process (pid ") == 2, done.stdout
    assert shared_memory() <= before, "processes have left shared memory behind"
