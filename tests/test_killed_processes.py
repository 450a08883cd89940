"""A process killed at any moment: the others hear of it within a second, say whose it was, and go on without it.

DEEP_EP_KILLS says how often, 10 by default.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from builds import BUILD

pytestmark = [pytest.mark.processes, pytest.mark.once]

KILLS = int(os.environ.get("DEEP_EP_KILLS", 10))
SECONDS = 1.0


def run_worker(script: Path, *arguments: str, timeout: float) -> subprocess.CompletedProcess[str]:
    """Run a script that forks ranks of the build under test."""
    tests = script.parent.parent
    paths = [str(tests), str(tests.parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "DEEP_EP_BUILD": BUILD, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, str(script), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)


@pytest.fixture(scope="module")
def trials(workers: Path) -> list[dict[str, Any]]:
    done = run_worker(workers / "killed_ranks.py", "--trials", str(KILLS), timeout=60 + 25 * KILLS)
    assert done.returncode == 0, done.stdout + done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == KILLS
    return found


def survivors(trials: list[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Each rank that was not killed, with its trial."""
    return [(one, trial) for trial in trials for one in trial["survivors"].values()]


def test_nobody_hangs(trials: list[dict[str, Any]]) -> None:
    for trial in trials:
        assert not trial["hung"] and len(trial["survivors"]) == trial["ranks"] - 1, trial


def test_all_hear_within_a_second_whose_process_it_was(trials: list[dict[str, Any]]) -> None:
    """Unless it was killed before the ranks had met: then what brings them together tells."""
    for one, trial in survivors(trials):
        assert one["seconds"] < SECONDS, (one, trial)
        assert one["named"] or "before the ranks had met" in one["texts"][0], (one, trial)
    assert sum(one["named"] for one, _ in survivors(trials)) > KILLS


def test_nothing_is_left_behind(trials: list[dict[str, Any]]) -> None:
    assert not any(trial["left_behind"] for trial in trials), trials


def test_those_left_go_on(trials: list[dict[str, Any]]) -> None:
    """With the Buffer they have; what they compute then is checked where they are."""
    for one, trial in survivors(trials):
        if trial["made"] == trial["ranks"]:
            assert one["masked"] == [trial["victim"]] and len(one["texts"]) == 1, (one, trial)
    assert any(trial["made"] == trial["ranks"] for trial in trials)


def test_who_is_left_out_stays_gone(workers: Path) -> None:
    """P16: what a rank that died earlier was watched by is closed, and its numbers are other files' now."""
    done = run_worker(workers / "killed_one_by_one.py", timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
