"""The script that checks a machine with a GPU, run on a machine without one."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from click.testing import CliRunner

from cases import BY_NAME
from deep_ep_py.bench import BenchConfig
from deep_ep_py.bench.cli import command as bench
from low_latency_gpu import WATCHED
from places import SCRIPTS

pytestmark = pytest.mark.once

SCRIPT = SCRIPTS / "gpu_check.py"


def check(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the script with an nvidia-smi that sees a GPU and without compute-sanitizer."""
    tools = folder / "tools"
    tools.mkdir()
    (tools / "nvidia-smi").write_text("#!/bin/sh\necho A GPU, 1.2, 3 MiB\n")
    (tools / "nvidia-smi").chmod(0o755)
    environment = {**os.environ, "PATH": f"{tools}:/usr/bin:/bin"}
    command = [sys.executable, str(SCRIPT), f"--out={folder / 'out'}", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)


def test_tests_that_find_no_gpu_have_not_passed(tmp_path: Path) -> None:
    """Skipped is not passed: it would be reported as a success."""
    done = check(tmp_path, "--quick", *(f"--only={name}" for name in ("tests", "low_latency_tests", "memcheck")))
    assert done.returncode == 1, done.stdout
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["machine"]["gpu"] == "A GPU, 1.2, 3 MiB"
    tests, low_latency, memcheck = report["steps"]
    assert (tests["name"], tests["result"], tests["note"]) == ("tests", "failed", "exit code 1")
    assert (low_latency["result"], low_latency["note"]) == ("failed", "exit code 1")
    assert (memcheck["result"], memcheck["note"]) == ("skipped", "there is no compute-sanitizer")
    assert report["benchmark"] is report["low_latency_benchmark"] is report["posting"] is None


def test_a_step_that_is_none(tmp_path: Path) -> None:
    done = check(tmp_path, "--only=speed")
    first = "build; canary; kernels; tests; low_latency_tests; elastic_tests; moe_tests; benchmark; "
    assert done.returncode == 2 and f"expected one of {first}" in done.stderr


def test_without_a_gpu(tmp_path: Path) -> None:
    environment = {**os.environ, "PATH": "/usr/bin:/bin"}
    command = [sys.executable, str(SCRIPT), f"--out={tmp_path}"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "there is no GPU here" in done.stderr


def test_what_python_lacks_is_said_in_a_line() -> None:
    """A Python without site-packages has none of the packages."""
    done = subprocess.run([sys.executable, "-S", str(SCRIPT)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "lacks click, rich, torch" in done.stderr and len(done.stderr.splitlines()) == 1


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_check"] = module  # dataclasses look the module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("found", "chosen", "shared"),
    [
        ({"side_by_side": {}, "launch": "plain"}, "plain", "passed"),
        ({"side_by_side": {}, "launch": "cooperative"}, "cooperative", "passed"),
        ({"side_by_side": {}, "launch": None}, "unset", "skipped"),
        ({"errors": ["no answer within 5 s"]}, "unset", "passed"),
    ],
    ids=["plain", "cooperative", "none", "unknown"],
)
def test_the_canary_chooses_for_the_steps_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: dict[str, Any], chosen: str, shared: str
) -> None:
    gpu_check = script()
    monkeypatch.delenv("DEEP_EP_LAUNCH", raising=False)
    (tmp_path / "canary.json").write_text('{"side_by_side": {}, "launch": "of an earlier run"}')

    def steps(out: Path, quick: bool) -> list[Any]:
        canary = f"cat > {out}/canary.json <<'END'\n{json.dumps(found)}\nEND"
        return [
            gpu_check.Step("canary", ["sh", "-c", canary], 9),
            gpu_check.Step("shared", ["true"], 9, shares=True),
            gpu_check.Step("alone", ["sh", "-c", "echo ${DEEP_EP_LAUNCH:-unset}"], 9),
        ]

    monkeypatch.setattr(gpu_check, "steps", steps)
    monkeypatch.setattr(gpu_check, "describe", lambda: {"gpu": "A GPU"})
    result = CliRunner().invoke(gpu_check.main, [f"--out={tmp_path}"])
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["canary"] == found
    assert [(step["name"], step["result"]) for step in report["steps"]] == [
        ("canary", "passed"),
        ("shared", shared),
        ("alone", "passed"),
    ]
    assert report["steps"][2]["note"] == chosen


def test_it_begins_with_the_canary(tmp_path: Path) -> None:
    names = [step.name for step in script().steps(tmp_path, quick=False)]
    assert names[:2] == ["build", "canary"]


@pytest.mark.parametrize("quick", [False, True])
def test_what_its_steps_are_told(tmp_path: Path, quick: bool) -> None:
    """The steps need a GPU, but without one the programs must at least accept their commands."""
    gpu_check = script()
    steps = {step.name: step for step in gpu_check.steps(tmp_path, quick)}
    for name, (_, environment) in gpu_check.BENCHMARKS.items():
        arguments = steps[name].command[steps[name].command.index("bench") + 1 :]
        options = bench.make_context("bench", arguments).params
        config = BenchConfig(**{key.name: options[key.name] for key in fields(BenchConfig) if options.get(key.name)})
        config.validate()
        assert (config.device, config.ranks) == ("cuda", 8) and steps[name].environment == environment
        assert config.mode == ("low-latency" if name.startswith("low_latency") else "normal")
        assert steps[name].shares, "the kernels of its ranks wait for each other"
    watched = [steps[name].command for name in gpu_check.SANITIZERS if name in steps]
    assert len(watched) == (1 if quick else 3)
    for command in watched:
        cases = command[command.index("tests/workers/gpu_case.py") + 1 :]
        assert {*cases} <= {*BY_NAME, *WATCHED} and {*cases} & {*WATCHED}
