"""The commands in the documents' blocks are run as they stand, but for those that others run or that need more."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from builds import LONG
from cases import AMPLE, Case
from deep_ep_py.base.choices import STAGES
from documents import BLOCK, PAGES, snippet
from places import ROOT
from recordings import record

pytestmark = pytest.mark.once

COMMAND = re.compile(
    r"\s*((?:[A-Z_]+=\S+ )*(?:\.venv/bin/)?(?:python|make|pip|git|deep-ep|torchrun|apt-get|sudo|export|cd|echo)\b[^#]*)"
)
ELSEWHERE = {
    r"^make (test|test-fast|test-all|test-rest|durations|gpu-lab)|scripts/run_tests\.py|-m pytest": "runs tests itself",
    r"^make demo$": "tests/e2e/test_demo.py",
    r"^make train$": "tests/e2e/test_train.py",
    r"^make bench$": "tests/e2e/test_bench.py",
    r"^git clone|^make build$|^cd \.\.$|pip install": "sets up; tests/packaging/test_wheel.py, each run of the tests",
    r"^make wheel$": "tests/packaging/test_wheel.py",
    r"deep-ep shim": "tests/api/test_shim.py, in an environment of its own",
    r"^sudo |^apt-get |^echo 'options|^export ": "changes the machine, or sets a variable for what follows",
    r"deep_ep_py profile": "tests/tools/profile/test_profile.py, in builds whose warps are as on a GPU",
    r"\bHOST\b": "needs two machines",
    r"test_(intranode|low_latency)\.py|^cd tests$": "needs a clone of DeepEP",
    r"deep_ep_py (canary|rates)|--device cuda": "needs a GPU",
}
"""Commands that are not run here, and who runs them or why they cannot be run."""
LONG_ONLY = r"deep_ep_py compile --all"
"""It takes long, and tests of single kernels have most of it in common."""
NEEDS = {"layer.py": "torchrun --nproc-per-node 4 layer.py"}


def commands() -> list[str]:
    """Return all of them once, in the order of the documents."""
    found = []
    for page in PAGES:
        for block in BLOCK.findall(page.read_text()):
            if block.startswith("```python"):
                continue
            for line in block.replace("\\\n", " ").splitlines():
                match = COMMAND.match(line)
                if match is not None:
                    found.append(" ".join(match[1].split()))
    return list(dict.fromkeys(found))


def elsewhere(command: str) -> bool:
    return any(re.search(pattern, command) for pattern in ELSEWHERE)


HERE = [command for command in commands() if not elsewhere(command)]


def run(command: str, folder: Path) -> str:
    """Run a command in a shell, as a user would whose environment is active."""
    scripts = Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}", "COLUMNS": "80"}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    done = subprocess.run(command, shell=True, cwd=folder, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


def one_of_the_long_tests(command: str) -> Any:
    here = pytest.mark.skipif(not LONG, reason="45 seconds: `make test-long`")
    return pytest.param(command, marks=(pytest.mark.long, here))


@pytest.mark.parametrize(
    "command",
    [
        one_of_the_long_tests(one)
        if re.search(LONG_ONLY, one)
        else pytest.param(one, marks=[pytest.mark.thorough] if "torchrun" in one else [])
        for one in HERE
        if not one.startswith("deep-ep trace")
    ],
)
def test_command(command: str, tmp_path: Path) -> None:
    for name, marker in NEEDS.items():
        if command.endswith(name):
            (tmp_path / name).write_text(snippet(marker))
    printed = run(command, tmp_path)
    assert printed.strip(), "it prints something"


@pytest.mark.thorough
def test_commands_on_timelines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In order, since each reads what those before it have written."""
    monkeypatch.setenv(STAGES, "on")
    case = Case("traced", 4, 20, hidden=64, topk=3, experts=8, ranks_per_node=2, num_nvl_bytes=AMPLE)
    record(tmp_path / "step.json", case, "ibgda", times=4)
    wanted = [one for one in HERE if one.startswith("deep-ep trace")]
    assert len(wanted) >= 4
    for command in wanted:
        run(command, tmp_path)
    assert (tmp_path / "step.png").stat().st_size > 10_000


def test_the_reasons_are_used() -> None:
    """Each belongs to a command, and the tests that they name exist."""
    for pattern, reason in ELSEWHERE.items():
        assert any(re.search(pattern, command) for command in commands()), pattern
        for path in re.findall(r"tests/\S+\.py", reason):
            assert (ROOT / path).exists(), path
    assert len(HERE) >= 8
