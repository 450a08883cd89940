"""Starts workers: with torchrun, or over the stand-in for the driver."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from builds import BUILD
from places import python_path


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
    environment = {**os.environ, "DEEP_EP_BUILD": BUILD, "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path()}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)


def on_threads(double: Path, worker: Path, log: Path, *arguments: str, **variables: str) -> str:
    """Run a worker whose ranks are threads, over the stand-in for the driver, and return what it printed."""
    machine = {"LD_LIBRARY_PATH": str(double), "DOUBLE_MULTIPROCESSORS": "132", "DOUBLE_LOG": str(log)}
    environment = {**os.environ, "PYTHONPATH": python_path(), **machine, **variables}
    command = [sys.executable, str(worker), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
