"""The virtual environment of the make targets: which packages are installed, and when again."""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import pytest

import setup_venv
from places import ROOT

pytestmark = pytest.mark.once


class Setup:
    """setup_venv for a project of its own, with its steps recorded instead of done."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.project = folder / "pyproject.toml"
        self.project.write_text("")
        self._venv, self._monkeypatch = folder / "venv", monkeypatch
        self._steps: list[str] = []
        monkeypatch.setattr(setup_venv, "ROOT", folder)
        monkeypatch.setattr(setup_venv, "create", self._create)
        monkeypatch.setattr(setup_venv, "complete", self._complete)
        monkeypatch.setattr(setup_venv, "complete_for_tests", lambda venv: self._steps.append("for tests"))

    def _complete(self, venv: Path, extra: str, build: bool) -> None:
        self._steps += [extra, "compile"] if build else [extra]

    def _create(self, venv: Path) -> None:
        self._steps.append("create")
        (venv / "bin").mkdir(parents=True)
        (venv / "bin" / "python").touch()

    def steps(self, *options: str) -> list[str]:
        """Return what a call of the script did."""
        self._steps.clear()
        self._monkeypatch.setattr(sys, "argv", ["setup_venv.py", str(self._venv), *options])
        setup_venv.main()
        return list(self._steps)


@pytest.fixture
def setup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Setup:
    return Setup(tmp_path, monkeypatch)


def test_the_small_set_is_completed_when_tests_need_more(setup: Setup) -> None:
    assert setup.steps("--runtime") == ["create", "plot"]
    assert setup.steps("--runtime") == []
    assert setup.steps() == ["test", "for tests"]
    assert setup.steps() == []
    assert setup.steps("--runtime") == []


def test_the_extension_is_compiled_meanwhile(setup: Setup) -> None:
    assert setup.steps("--runtime", "--build") == ["create", "plot", "compile"]
    assert setup.steps("--runtime", "--build") == [], "the next step compiles what has changed"


@pytest.mark.parametrize("fails", [False, True])
def test_what_is_compiled_while_packages_are_installed(
    fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It begins once there is what it needs, is over at the end, and ends with a failure."""
    steps, project = list[str](), tmp_path / "setup.py"
    begun, goes_on, compiled = (tmp_path / name for name in ("begun", "goes_on", "compiled"))
    project.write_text(
        "import pathlib, time\n"
        "pathlib.Path('begun').touch()\n"
        "while not pathlib.Path('goes_on').exists(): time.sleep(0.01)\n"
        "pathlib.Path('compiled').touch()\n"
    )
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)

    def run(*command: str | Path) -> None:
        steps.append(str(command[-1]))
        if command[-1] == "pybind11>=2.12":
            assert not begun.exists()
            return
        until = time.monotonic() + 60
        while not begun.exists() and time.monotonic() < until:
            time.sleep(0.01)
        assert begun.exists() and not compiled.exists()
        if "--editable" not in command:
            return
        if fails:
            raise subprocess.CalledProcessError(1, "pip")
        goes_on.touch()

    monkeypatch.setattr(setup_venv, "ROOT", tmp_path)
    monkeypatch.setattr(setup_venv, "run", run)
    monkeypatch.setattr(setup_venv, "imports", lambda python, module: False)
    with pytest.raises(subprocess.CalledProcessError) if fails else nullcontext():
        setup_venv.complete(tmp_path / "venv", "plot", build=True)
    assert steps == ["pybind11>=2.12", setup_venv.TORCH, ".[plot]"]
    assert compiled.exists() == (not fails)


def test_the_full_set_contains_the_small_one(setup: Setup) -> None:
    assert setup.steps() == ["create", "test", "for tests"]
    assert setup.steps("--runtime") == []


def test_a_change_of_the_project_concerns_both_sets(setup: Setup) -> None:
    setup.steps()
    setup.project.write_text("changed")
    assert setup.steps("--runtime") == ["plot"]
    assert setup.steps() == ["test", "for tests"]
    assert setup.steps() == setup.steps("--runtime") == []


def test_what_failed_is_tried_again(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(venv: Path) -> None:
        raise subprocess.CalledProcessError(1, "pip")

    with monkeypatch.context() as patch:
        patch.setattr(setup_venv, "complete_for_tests", fail)
        with pytest.raises(subprocess.CalledProcessError):
            setup.steps()
    assert setup.steps() == ["test", "for tests"]


@pytest.mark.parametrize(
    ("target", "small", "compiles"),
    [
        *[("demo", True, True), ("train", True, True), ("wheel", True, False)],
        *[("build", False, True), ("test", False, True), ("test-fast", False, True), ("lint", False, False)],
    ],
)
def test_targets_ask_for_what_they_need(target: str, small: bool, compiles: bool) -> None:
    planned = subprocess.check_output(["make", "--dry-run", "--no-print-directory", target], cwd=ROOT, text=True)
    (setup,) = (line for line in planned.splitlines() if "setup_venv.py" in line)
    assert ("--runtime" in setup, "--build" in setup) == (small, compiles)


def test_what_is_installed_is_what_the_project_declares() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    assert f'clang = ["{setup_venv.CLANG}"]' in project
    assert all(f"\n{extra} = [" in project for extra in (setup_venv.RUNTIME_EXTRA, setup_venv.TEST_EXTRA))
