"""Files that commands write when they are done: what is checked before the work, and what is left if it fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from deep_ep_py.base.files import check_writable
from deep_ep_py.session.timeline.chrome import write
from deep_ep_py.tools.bench import cli as bench

pytestmark = pytest.mark.once

VERIFIED = {"verified": True}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that is the current one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", ["report.json", "out/report.json", "a/b/c/report.json"])
def test_a_check_leaves_nothing(folder: Path, name: str) -> None:
    check_writable(Path(name))
    assert not any(folder.iterdir())


def test_a_check_keeps_what_is_there(folder: Path) -> None:
    (folder / "report.json").write_text("kept")
    check_writable(Path("report.json"))
    assert (folder / "report.json").read_text() == "kept"


@pytest.mark.parametrize(
    ("name", "error", "place"),
    [
        ("file/report.json", NotADirectoryError, "file"),
        ("file/a/b/report.json", NotADirectoryError, "file"),
        ("/proc/a/report.json", OSError, "/proc"),
        ("/proc/report.json", OSError, "/proc/report.json"),
    ],
)
def test_a_check_names_what_cannot_be_written(folder: Path, name: str, error: type[OSError], place: str) -> None:
    (folder / "file").touch()
    with pytest.raises(error) as info:
        check_writable(Path(name))
    assert info.value.filename == place


def test_a_timeline_makes_its_folder(folder: Path) -> None:
    write(Path("a/b/timeline.json"), [], {})
    assert (folder / "a/b/timeline.json").exists()


def run_bench(monkeypatch: pytest.MonkeyPatch, measure: Any, plots: bool = True) -> int:
    monkeypatch.setattr(bench, "_measure", measure)
    monkeypatch.setattr(bench, "can_plot", lambda: plots)
    for shown in ("print_report", "print_verdict"):
        monkeypatch.setattr(bench, shown, lambda report, console: None, raising=False)
    return CliRunner().invoke(bench.command, ["--ranks=2"]).exit_code


def fail(*_: Any) -> Any:
    raise click.ClickException("a rank has failed")


def test_a_benchmark_that_fails_leaves_no_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_bench(monkeypatch, fail) == 1
    assert not any(folder.iterdir())


def test_a_benchmark_without_a_plot_leaves_no_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_bench(monkeypatch, lambda *_: VERIFIED, plots=False) == 0
    assert not any(folder.iterdir())
