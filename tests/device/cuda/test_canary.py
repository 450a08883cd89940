"""The findings of the canary over the stand-in for the driver, in the best and the worst cases."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from deep_ep_py.device.canary import observe
from deep_ep_py.tools.cli import canary as cli_canary
from places import python_path

pytestmark = [pytest.mark.once, pytest.mark.timed]

GOOD = {
    "side_by_side": {"cooperative": 8, "plain": 8},
    "launch": "cooperative",
    "pinned_atomics": "atomic",
    "stores_among_atomics": {"gpu": "stay", "pinned": "stay"},
    "heap_words_clear": True,
    "memory_is_handed_out_dirty": True,
    "heap_import": True,
    "mapping_beside_a_kernel": True,
}
MODES: dict[str, dict[str, Any]] = {
    "NONE=": {},
    "DOUBLE_COOPERATIVE_SERIAL=1": {"side_by_side": {"cooperative": 1, "plain": 8}, "launch": "plain"},
    "DOUBLE_SERIAL=1": {
        "side_by_side": {"cooperative": 1, "plain": 1},
        "launch": None,
        "mapping_beside_a_kernel": False,
    },
    "DOUBLE_MAP_WAITS=1": {"mapping_beside_a_kernel": False},
    "DOUBLE_OLD=1": {"side_by_side": {"cooperative": 0, "plain": 8}, "launch": "plain"},
    "DOUBLE_LOADS_WHEN_ASKED=1": {},
    "DOUBLE_LOCAL_BYTES=9000": {},
}


def environment(double: Path, **variables: str) -> dict[str, str]:
    queues = {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "DOUBLE_MULTIPROCESSORS": "132"}
    return {**os.environ, "LD_LIBRARY_PATH": str(double), "PYTHONPATH": python_path(), **queues, **variables}


@pytest.mark.thorough
def test_every_mode_of_the_driver(double: Path, workers: Path) -> None:
    command = [sys.executable, str(workers / "canary_on_double.py"), *MODES]
    done = subprocess.run(command, env=environment(double), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = []
    for line in done.stdout.splitlines():
        finding = json.loads(line)
        if "gpu" in finding:
            found.append({})
        found[-1].update(finding)
    assert len(found) == len(MODES)
    for seen, (mode, differs) in zip(found, MODES.items()):
        assert seen == {"gpu": "Double", **GOOD, **differs}, mode


@pytest.mark.thorough
def test_a_driver_that_hangs_is_given_up(double: Path, workers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Earlier findings are kept, here that 8 streams share 4 queues. The process no longer exists."""
    faults = {"DOUBLE_MAP_HANGS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "4"}
    for name, value in environment(double, **faults).items():
        monkeypatch.setenv(name, value)
    found = observe([sys.executable, str(workers / "canary_on_double.py")], seconds=6.0)
    assert found["errors"] == ["no answer within 6 s, so it was killed"]
    assert found["side_by_side"] == {"cooperative": 2, "plain": 2} and found["launch"] == "cooperative"
    assert "heap_words_clear" not in found


def test_one_that_says_nothing(tmp_path: Path) -> None:
    """It never becomes ready, or it exits by itself, successfully or not."""
    began = time.monotonic()
    asleep = observe([sys.executable, "-c", "import time; time.sleep(60)"], ready_seconds=0.5)
    ended = observe([sys.executable, "-c", "raise SystemExit(3)"])
    closing = "import os, time; os.close(1); time.sleep(60)"
    stays = observe([sys.executable, "-c", closing])
    assert time.monotonic() - began < 20
    assert asleep == {"errors": ["no answer within 0.5 s, so it was killed"]}
    assert ended == {"errors": ["it ended with exit code 3"]}
    assert stays == {"errors": ["it did not end, so it was killed"]}


@pytest.mark.parametrize(
    ("found", "code", "said"),
    [
        (GOOD, 0, "DEEP_EP_LAUNCH=cooperative"),
        ({**GOOD, "launch": "plain"}, 0, "DEEP_EP_LAUNCH=plain"),
        ({**GOOD, "launch": None}, 1, "ranks cannot share this GPU"),
        ({**GOOD, "heap_import": False}, 1, "heaps do not work"),
        ({}, 1, "error: there is no GPU"),
    ],
    ids=["good", "plain", "serial", "heaps", "nothing"],
)
def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: dict[str, Any], code: int, said: str
) -> None:
    found = {"errors": [] if found else ["there is no GPU"], **found}
    monkeypatch.setattr(cli_canary, "observe", lambda: found)
    result = CliRunner().invoke(cli_canary.command, [f"--json={tmp_path / 'out' / 'canary.json'}"])
    assert result.exit_code == code and said in result.output, result.output
    assert json.loads((tmp_path / "out" / "canary.json").read_text()) == found
