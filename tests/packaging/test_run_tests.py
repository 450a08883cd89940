"""The runner of the tests: shards, jobs beside each other, and what it makes of their outcomes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

import durations
import jobs
import native_build
import run_tests
from jobs import Finished, Job
from places import SCRIPTS

pytestmark = pytest.mark.once


def python(name: str, program: str, seconds: float = 1.0, alone: bool = False, after: tuple[str, ...] = ()) -> Job:
    return Job(name, [sys.executable, "-c", program], seconds, after=frozenset(after), alone=alone)


def run(chosen: list[Job], folder: Path, at_once: int = 2) -> dict[str, Finished]:
    """Run jobs and return their outcomes in the order in which they ended."""
    ended: dict[str, Finished] = {}
    jobs.run(chosen, at_once, folder, folder, lambda end: ended.update({end.job.name: end}), lambda running: None)
    return ended


def test_a_failure_does_not_end_the_others(tmp_path: Path) -> None:
    chosen = [
        python("bad", "import sys; print('why'); sys.exit(3)", 9.0),
        python("needs it", "print()", after=("bad",)),
        python("needs that", "print()", after=("needs it",)),
        python("good", "print('fine')", after=("not among them",)),
    ]
    ended = run(chosen, tmp_path, at_once=1)
    assert [(name, end.exit_code) for name, end in ended.items()] == [
        ("bad", 3),
        ("needs it", None),
        ("needs that", None),
        ("good", 0),
    ]
    assert (tmp_path / "bad.log").read_text() == "why\n" and (tmp_path / "good.log").read_text() == "fine\n"


def test_a_job_that_runs_alone(tmp_path: Path) -> None:
    """It runs before what is ready with it, and nothing starts until it has ended."""
    stamp = "import time, pathlib; p = pathlib.Path('{0}'); p.write_text(str(time.time())); time.sleep(0.3)"
    stamp += "; p.write_text(p.read_text() + ' ' + str(time.time()))"
    names = ("a", "b", "alone")
    run([python(name, stamp.format(name), alone=name == "alone") for name in names], tmp_path)
    times = {name: [float(part) for part in (tmp_path / name).read_text().split()] for name in names}
    assert max(times["alone"]) < min(times["a"] + times["b"])
    assert times["a"][0] < times["b"][1] and times["b"][0] < times["a"][1], "these two run beside each other"


def test_it_sees_memory_and_death(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "SAMPLE_SECONDS", 0.3)
    of_the_runner = bytearray(b"x") * (1 << 30)  # not the job's, though the job's process is forked from this one
    ended = run(
        [
            python("large", "import subprocess, sys; subprocess.run([sys.executable, '-c', "
                   "'import time; x = bytearray(300 << 20); time.sleep(1.5)'])"),
            python("dies", "import os; os.abort()"),
        ],
        tmp_path,
    )  # fmt: skip
    assert ended["large"].exit_code == 0 and 300 << 20 < ended["large"].peak_bytes < len(of_the_runner)
    assert ended["dies"].exit_code == 128 + 6


def test_ctrl_c_ends_all(tmp_path: Path) -> None:
    """Also what a job has started, and a job that does not want to end."""
    child = (
        "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); print(end='', flush=True); time.sleep(99)"
    )
    parent = (
        f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {child!r}]); print(p.pid, flush=True)"
    )
    program = f"""
import signal, sys
from pathlib import Path
sys.path.insert(0, {str(SCRIPTS)!r})
import jobs
signal.signal(signal.SIGINT, signal.default_int_handler)  # tests that run in the background ignore it
jobs.LAST_SECONDS = 0.5
job = jobs.Job("job", [sys.executable, "-c", {parent + "; p.wait()"!r}], 1.0)
jobs.run([job], 2, Path({str(tmp_path)!r}), Path({str(tmp_path)!r}), print, lambda running: None)
"""
    runner = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True)
    log = tmp_path / "job.log"
    deadline = time.monotonic() + 30
    while not (log.exists() and log.read_text().strip()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    runner.send_signal(signal.SIGINT)
    assert "KeyboardInterrupt" in runner.communicate(timeout=30)[1]
    grandchild = Path("/proc") / log.read_text().strip()
    state = grandchild.joinpath("stat").read_text().split()[2] if grandchild.exists() else "gone"
    assert state in ("gone", "Z"), "the process that ignores Ctrl-C still runs"


def test_expected_seconds() -> None:
    chosen = [python(name, "", 10.0 * number) for number, name in enumerate("abcd", 1)]  # 10, 20, 30, 40
    assert jobs.expected_seconds(chosen, 1) == 100.0
    assert jobs.expected_seconds(chosen, 2) == 50.0  # 40 and 10, 30 and 20
    assert jobs.expected_seconds(chosen, 9) == 40.0
    assert jobs.expected_seconds([*chosen, python("build", "", 5.0, alone=True)], 2) == 55.0
    assert jobs.expected_seconds([python("last", "", 7.0, after=("a",)), *chosen[:1]], 2) == 17.0


def test_shards_hold_every_file_once() -> None:
    recorded = {"a/long": 250.0, "b/1": 60.0, "b/2": 50.0, "c/1": 30.0, "gone": 7.0, durations.START: 5.0}
    shards = durations.cut(["c/1", "b/2", "a/long", "b/1", "c/new"], recorded, 150.0)
    assert shards == [
        durations.Shard(("a/long",), 255.0),
        durations.Shard(("b/1",), 65.0),
        durations.Shard(("b/2", "c/1", "c/new"), 135.0),
    ], "in order; a new file counts as the median, 50 s"
    assert durations.cut(["x", "y"], {}, float("inf")) == [durations.Shard(("x", "y"), 2.0)]
    assert durations.cut(["x", "y"], {"x": 0.0, "y": 0.0}) == [durations.Shard(("x", "y"), 0.0)]


def test_only_parts_that_ran_are_recorded_again(tmp_path: Path) -> None:
    file = tmp_path / "durations.json"
    durations.write({"fast": {"a": 1.04, "b": 2.0}, "asan": {"a": 3.0}}, file)
    durations.write({"fast": {"a": 5.0}}, file)
    assert durations.read(file) == {"fast": {"a": 5.0}, "asan": {"a": 3.0}}
    assert durations.read(tmp_path / "none") == {}


def test_every_recorded_file_exists() -> None:
    """A renamed file would count as new, and its old name would count towards the budget."""
    recorded = durations.read()
    files = {file for part in run_tests.SUITES for file in recorded.get(part, {}) if file != durations.START}
    assert files and not [file for file in sorted(files) if not (native_build.ROOT / file).exists()]


def test_files_have_names_of_their_own() -> None:
    """Two modules of one name cannot be in one pytest, and which files are in one shard depends on their durations."""
    names = [path.name for path in (native_build.ROOT / "tests").rglob("test_*.py")]
    assert [name for name, count in Counter(names).items() if count > 1] == []


@pytest.mark.parametrize("part", run_tests.SUITES)
def test_a_part_runs_every_file(part: str) -> None:
    """What of a file the part selects is decided by marks alone; one that runs alone takes files that set its mark."""
    suite, tests = run_tests.SUITES[part], native_build.ROOT / "tests"
    shards = run_tests.suite_jobs(part, durations.read(), [])
    files = [argument for job in shards for argument in job.command if str(argument).endswith(".py")]
    mark = f"mark.{suite.marks.split()[0]}" if suite.alone else ""
    paths = [path for path in tests.rglob("test_*.py") if mark in path.read_text()]
    assert sorted(files) == sorted(str(path.relative_to(native_build.ROOT)) for path in paths)
    assert all(job.alone == suite.alone for job in shards)
    elsewhere = [path for path in tests.rglob("*.py") if not path.name.startswith("test_")]
    added = f'add_marker("{mark.removeprefix("mark.")}")'
    assert not mark or not [path for path in elsewhere if mark in path.read_text() or added in path.read_text()]


def test_a_budget_that_is_exceeded_is_a_failure() -> None:
    limit = run_tests.BUDGET_SECONDS - run_tests.SETUP_SECONDS
    assert run_tests.budget([python("one", "", limit)]).failed == 0
    assert run_tests.budget([python("one", "", limit + 1)]).failed == 1


def finished(name: str, exit_code: int | None, tests: Callable[[], None] | None = None) -> run_tests.Result:
    """Return what a run makes of one job's outcome."""
    job = Job(name, [], 0.0)
    chosen = run_tests.Run([job])
    (run_tests.REPORTS / f"{name}.log").write_text("the log\n")
    if tests is not None:
        tests()
    chosen.ended(Finished(job, exit_code, 4.0))
    return chosen.results()[0]


@pytest.fixture
def reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(run_tests, "REPORTS", tmp_path)
    return tmp_path


def junit(path: Path, *outcomes: str) -> Callable[[], None]:
    cases = "".join(
        f"<testcase classname='tests.a.test_b' name='{i}' time='1.5'>{o}</testcase>" for i, o in enumerate(outcomes)
    )
    return lambda: [path.write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>"), None][1]


def test_what_becomes_of_a_shard(reports: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fine = finished("fast 1", 0, junit(reports / "fast 1.xml", "", "<skipped message='no GPU'/>"))
    assert (fine.passed, fine.failed, fine.skipped) == (1, 0, {"no GPU": 1})
    assert fine.files == {"tests/a/test_b.py": 3.0} and fine.starts == [1.0]
    assert "the log" not in capsys.readouterr().out
    bad = finished("fast 2", 1, junit(reports / "fast 2.xml", "<failure/>"))
    assert (bad.passed, bad.failed) == (0, 1) and "the log" in capsys.readouterr().out
    died = finished("asan 1", 134)
    assert died.failed == 1 and died.notes == ["pytest ended with exit code 134; asan 1"]
    silent = finished("asan 2", 2, junit(reports / "asan 2.xml", ""))
    assert silent.failed == 1, "its tests passed, but it did not"
    none = finished("races 1", run_tests.NO_TESTS, junit(reports / "races 1.xml"))
    assert (none.passed, none.failed) == (0, 0)
    left_out = finished("races 2", None)
    assert left_out.failed == 1 and "a build that it needs has failed" in left_out.notes[0]


def test_a_reported_race_fails_its_test(tmp_path: Path) -> None:
    (tmp_path / "test_race.py").write_text(
        "import os\ndef test_race(): os.write(2, b'WARNING: ThreadSanitizer: data race')\ndef test_fine(): pass\n"
    )
    report = tmp_path / "report.xml"
    command = [*run_tests.PYTEST, f"--junitxml={report}", "--rootdir", str(tmp_path), str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(SCRIPTS)}
    subprocess.run(command, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL)
    result = run_tests.Result("races")
    assert run_tests.read_junit(report, result)
    assert (result.passed, result.failed) == (1, 1)


def test_summary_closes_with_the_counts(reports: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fine = run_tests.Result("fast", passed=3)
    fine.skipped["no GPU"] += 2
    assert run_tests.summarize([fine], 0.0) == 0
    bad = run_tests.Result("exact", passed=1, failed=1, notes=["pytest ended with exit code 134"])
    assert run_tests.summarize([fine, bad], 0.0) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "4 passed, 1 failed, 2 skipped"
    assert any("no GPU" in line for line in lines)
    assert any("134" in line for line in lines)
