"""The script that checks a machine with a GPU, where there is none: what it says then."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.once

SCRIPT = Path(__file__).parent.parent / "scripts" / "gpu_check.py"


def check(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs it with an nvidia-smi that sees a GPU, and without compute-sanitizer."""
    tools = folder / "tools"
    tools.mkdir()
    (tools / "nvidia-smi").write_text("#!/bin/sh\necho A GPU, 1.2, 3 MiB\n")
    (tools / "nvidia-smi").chmod(0o755)
    environment = {**os.environ, "PATH": f"{tools}:/usr/bin:/bin"}
    command = [sys.executable, str(SCRIPT), f"--out={folder / 'out'}", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)


def test_tests_that_find_no_gpu_have_not_passed(tmp_path: Path) -> None:
    """Skipped is not passed: that would be told as a success."""
    done = check(tmp_path, "--quick", "--only=tests", "--only=memcheck")
    assert done.returncode == 1, done.stdout
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["machine"]["gpu"] == "A GPU, 1.2, 3 MiB"
    tests, memcheck = report["steps"]
    assert (tests["name"], tests["result"], tests["note"]) == ("tests", "failed", "exit code 1")
    assert (memcheck["result"], memcheck["note"]) == ("skipped", "there is no compute-sanitizer")
    assert report["benchmark"] is report["fp8_benchmark"] is report["posting"] is None


def test_a_step_that_is_none(tmp_path: Path) -> None:
    done = check(tmp_path, "--only=speed")
    steps = "build; kernels; tests; benchmark; fp8_benchmark; vector_copies; pushed_combine; posting; rates; memcheck; "
    assert done.returncode == 2 and f"expected one of {steps}" in done.stderr


def test_without_a_gpu(tmp_path: Path) -> None:
    environment = {**os.environ, "PATH": "/usr/bin:/bin"}
    command = [sys.executable, str(SCRIPT), f"--out={tmp_path}"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "there is no GPU here" in done.stderr


def test_what_python_lacks_is_said_in_a_line() -> None:
    """A Python without site-packages has nothing of it."""
    done = subprocess.run([sys.executable, "-S", str(SCRIPT)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "lacks click, rich, torch" in done.stderr and len(done.stderr.splitlines()) == 1
