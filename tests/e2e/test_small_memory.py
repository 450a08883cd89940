"""Kept outputs in a container with little memory: the arena's default follows the limit of the cgroup."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from places import python_path

pytestmark = pytest.mark.once

LIMIT = 2 << 30
KEPT_MEGABYTES = 640
"""On each of two ranks: more than the arena's default of half the limit for both, and less than the limit."""


def own_memory_cgroup() -> tuple[Path, str]:
    """Return the folder of this process's cgroup that limits memory, and the name of the file with the limit."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return Path("/sys/fs/cgroup/memory") / path.lstrip("/"), "memory.limit_in_bytes"
    return Path("/sys/fs/cgroup"), "memory.max"


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """Return the list of processes of a cgroup with little memory."""
    parent, limit = own_memory_cgroup()
    folder = parent / f"deep_ep_py_test_{os.getpid()}"
    try:
        folder.mkdir()
        (folder / limit).write_text(str(LIMIT))
    except OSError as error:
        with suppress(OSError):
            folder.rmdir()
        pytest.skip(f"needs the right to make a cgroup with a limit: {error}")
    yield folder / "cgroup.procs"
    with suppress(OSError):
        folder.rmdir()


@pytest.mark.thorough
def test_kept_outputs_in_a_cgroup_of_2_gib(cgroup: Path, workers: Path) -> None:
    """An arena of half the machine's memory would be larger than the container."""

    def join() -> None:
        cgroup.write_text(str(os.getpid()))

    done = subprocess.run(
        [sys.executable, str(workers / "small_memory.py"), str(KEPT_MEGABYTES)],
        env={**os.environ, "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        preexec_fn=join,
    )
    assert done.returncode == 0, f"exit code {done.returncode}; -9: killed for memory\n{done.stdout}{done.stderr}"
    counts = ast.literal_eval(done.stdout)
    assert 0 < counts["arena_bytes"] <= LIMIT // 4, "half of the limit, for two ranks"
    assert counts["direct"] and counts["rounds"], "some outputs must be in the arena, and some elsewhere"
