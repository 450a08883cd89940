"""Run parts of the tests as shards, as many at once as there are cores and memory for, and summarize them.

    python scripts/run_tests.py [PART ...] [--record] [-- PYTEST ARGUMENTS]

`make test` runs the default parts: lint; timed, the tests in the fast build that measure time; and fast, asan and
races, the other tests of these builds, without those that are marked thorough. `make test-all` adds the parts that it
leaves out: timed-rest, fast-rest, asan-rest and races-rest, the tests marked thorough; and mutants, a planted bug per
folder and build. Other parts run only if named: exact, whose code and tests are also in asan, which checks more;
compile, the report of the GPU kernels; quick and quick-exact, the short tests with few schedules; long, hundreds of
kills and stalls and a soak; many and many-exact, the schedule tests with five times as many schedules; values, steps
and silent, all planted bugs: those in values, those in the order of steps, and those that are races and must leave all
values right when no race occurs.

A part is cut into shards of whole files by the durations in tests/durations.json; --record replaces those of the parts
that run. With pytest arguments a part runs the tests that they select: `run_tests.py races --
tests/modes/normal/test_layout.py -k empty`.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

import durations
import jobs
import native_build
import sanitizers
import toolchain
from jobs import Finished, Job

ROOT = native_build.ROOT
REPORTS = ROOT / "build" / "reports"
PYTEST = [sys.executable, "-m", "pytest", "-p", "pytest_sanitizers", "-rsfE"]


@dataclass(frozen=True)
class Suite:
    """Tests that run in one build."""

    build: str
    marks: str
    options: tuple[str, ...] = ()
    setting: str = ""
    """An environment variable that tests/support/builds.py reads."""
    like: str = ""
    """The part by whose durations this one is cut, if not by its own."""
    alone: bool = False
    """It is one shard, and nothing runs beside it."""


# A sanitizer that ends the process writes to stderr directly, so asan does not capture the file descriptor.
_ASAN = ("--capture=sys",)
# Tests of up to an hour, which print their progress.
_LONG = ("--capture=no", "-v", "-o", "timeout=5400", "-o", "faulthandler_timeout=5430")
SUITES = {
    "timed": Suite("fast", "timed and not thorough", alone=True),
    "fast": Suite("fast", "not timed and not thorough"),
    "asan": Suite("asan", "not once and not thorough", _ASAN),
    "races": Suite("tsan", "not once and not thorough"),
    "timed-rest": Suite("fast", "timed and thorough", alone=True),
    "fast-rest": Suite("fast", "not timed and thorough"),
    "asan-rest": Suite("asan", "not once and thorough", _ASAN),
    "races-rest": Suite("tsan", "not once and thorough"),
    "exact": Suite("exact", "not once", like="asan"),
    "quick": Suite("fast", "not timed and not slow and not thorough", setting="DEEP_EP_QUICK", like="fast"),
    "quick-exact": Suite(
        "exact", "not once and not timed and not slow and not thorough", setting="DEEP_EP_QUICK", like="asan"
    ),
    "long": Suite("fast", "long", _LONG, setting="DEEP_EP_LONG", alone=True),
    "many": Suite("fast", "not once and not timed", setting="DEEP_EP_LONG", like="fast"),
    "many-exact": Suite("exact", "not once and not timed", setting="DEEP_EP_LONG", like="asan"),
}
# Parts that plant bugs, and their arguments for scripts/mutants.py. Each bug costs the compilation of a program: a few
# show that the tests still catch bugs; trying all of them is left to the long suite.
MUTANTS = {
    "mutants": ["--build", "exact", "--build", "tsan", "--few"],
    "steps": ["--build", "exact"],
    "values": ["--build", "fast"],
    "silent": ["--build", "tsan", "--silent"],
}
_CLANG_FORMAT = "import clang_format; clang_format.clang_format()"
LINT = {
    "ruff-format": ["-m", "ruff", "format", "--check", "--quiet", "--diff", "."],
    "ruff-check": ["-m", "ruff", "check", "--quiet", "."],
    "clang-format": ["-c", _CLANG_FORMAT, "--dry-run", "-Werror"],
    "mypy": ["-m", "mypy"],
}
NATIVE = ("benchmarks", "csrc", "tests/native")
COMPILE_ARCHITECTURES = ("sm_90a", "sm_100a")
DEFAULT_PARTS = ("lint", "timed", "fast", "asan", "races")
PARTS = tuple(dict.fromkeys((*DEFAULT_PARTS, *SUITES, *MUTANTS, "compile")))

# What the default parts may take from a clean clone on 2 cores, and what of it the set-up takes, fast build included.
BUDGET_CORES, BUDGET_SECONDS, SETUP_SECONDS = 2, 15 * 60, 110
PROGRESS_SECONDS = 30.0
LONGEST = 12
NO_TESTS = 5  # an exit code of pytest

console = Console(highlight=False, soft_wrap=True)


@dataclass
class Result:
    """One line of the summary: a part, of which several jobs may tell."""

    name: str
    passed: int = 0
    failed: int = 0
    skipped: Counter[str] = field(default_factory=Counter)  # by reason
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0  # of all jobs
    longest: float = 0.0  # of one job
    peak_bytes: int = 0
    durations: dict[str, float] = field(default_factory=dict)  # by test
    files: dict[str, float] = field(default_factory=dict)  # by test file
    starts: list[float] = field(default_factory=list)  # what each pytest took besides its tests

    def skip(self, reason: str) -> None:
        self.skipped[reason] += 1

    def add(self, finished: Finished) -> None:
        """Add the cost of a job."""
        self.seconds += finished.seconds
        self.longest = max(self.longest, finished.seconds)
        self.peak_bytes = max(self.peak_bytes, finished.peak_bytes)


def heading(text: str) -> None:
    console.rule(f"[bold]{text}")


def part_of(job: Job) -> str:
    """Return the part that a job belongs to: its name begins with it."""
    return job.name.partition(" ")[0]


def junit_of(job: Job) -> Path:
    return REPORTS / f"{job.name}.xml"


def current_test(job: Job) -> str:
    """Return the test of the job that is running or ran last."""
    path = REPORTS / f"{job.name}.current"
    return f"{job.name} at {path.read_text()}" if path.exists() else job.name


def read_junit(path: Path, result: Result) -> bool:
    """Add the counts of a pytest report; return False if pytest died before it wrote the report."""
    if not path.exists():
        return False
    for case in ElementTree.parse(path).iter("testcase"):
        module, seconds = case.get("classname", ""), float(case.get("time", 0))
        result.durations[f"{module}::{case.get('name')}"] = seconds
        file = module.replace(".", "/") + ".py"
        result.files[file] = result.files.get(file, 0.0) + seconds
        skipped = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            result.failed += 1
        elif skipped is not None:
            result.skipped[skipped.get("message", "no reason given")] += 1
        else:
            result.passed += 1
    return True


def pytest_job(name: str, suite: Suite, arguments: list[str], seconds: float) -> Job:
    """Return the job of one pytest."""
    environment = sanitizers.environment(native_build.VARIANTS[suite.build])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT / "scripts"), os.environ.get("PYTHONPATH", "")]))
    environment["OMP_NUM_THREADS"] = "1"  # torch's: shards and ranks share the cores
    environment["PYTHONDONTWRITEBYTECODE"] = ""  # where the environment forbids it, each shard compiles all modules
    environment["DEEP_EP_CURRENT_TEST"] = str(REPORTS / f"{name}.current")
    if suite.setting:
        environment[suite.setting] = "1"
    command = [*PYTEST, f"--junitxml={REPORTS / f'{name}.xml'}", *suite.options, *arguments]
    return Job(name, command, seconds, environment, frozenset({f"build {suite.build}"}), suite.alone)


def test_files(mark: str = "") -> list[str]:
    """Return all files of tests, or those in which a mark is set."""
    paths = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(path.relative_to(ROOT)) for path in paths if not mark or f"mark.{mark}" in path.read_text()]


def suite_jobs(part: str, recorded: durations.Recorded, pytest_arguments: list[str]) -> list[Job]:
    """Return the jobs of a part that pytest runs: one for each shard."""
    suite = SUITES[part]
    known = recorded.get(part) or recorded.get(suite.like, {})
    if pytest_arguments:
        marks = ["-m", suite.marks] if suite.setting else []  # a test that is named runs whatever its marks
        return [pytest_job(part, suite, [*marks, *pytest_arguments], 0.0)]
    if suite.alone:  # collecting all tests would take longer than many of those that it runs
        shards = durations.cut(test_files(suite.marks.partition(" ")[0]), known, float("inf"))
    else:
        shards = durations.cut(test_files(), known)
    return [
        pytest_job(f"{part} {number}", suite, ["-m", suite.marks, *shard.files], shard.seconds)
        for number, shard in enumerate(shards, 1)
    ]


def jobs_of(part: str, recorded: durations.Recorded, pytest_arguments: list[str]) -> list[Job]:
    """Return the jobs of a part."""
    known = recorded.get(part, {})
    if part in SUITES:
        return suite_jobs(part, recorded, pytest_arguments)
    if part in MUTANTS:  # they keep all cores busy themselves
        command = [sys.executable, "scripts/mutants.py", *MUTANTS[part]]
        return [Job(part, command, known.get(part, 0.0), alone=True)]
    if part == "lint":
        native = [path for folder in NATIVE for path in sorted((ROOT / folder).rglob("*.*"))]
        sources = {"clang-format": [str(p.relative_to(ROOT)) for p in native if p.suffix in (".cu", ".h", ".cpp")]}
        return [
            Job(f"lint {name}", [sys.executable, *command, *sources.get(name, [])], known.get(f"lint {name}", 1.0))
            for name, command in LINT.items()
        ]
    command = [sys.executable, "-m", "deep_ep_py", "compile", "--all", "--fresh", "--arch"]
    return [
        Job(f"compile {name}", [*command, name], 0.0, {"DEEP_EP_BUILD": "fast"}, frozenset({"build fast"}))
        for name in COMPILE_ARCHITECTURES
    ]


def build_jobs(parts: list[str], recorded: durations.Recorded) -> list[Job]:
    """Return the jobs that compile the builds the parts need. Each keeps all cores busy."""
    names = [SUITES[part].build for part in parts if part in SUITES] + ["fast" for part in parts if part == "compile"]
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    known = recorded.get("build", {})
    return [
        Job(f"build {name}", command, known.get(f"build {name}", 0.0), {"DEEP_EP_BUILDS": name}, alone=True)
        for name in dict.fromkeys(names)
    ]


class Run:
    """The jobs of one run and what has become of them."""

    def __init__(self, chosen: list[Job]) -> None:
        self._results: dict[str, Result] = {}
        for job in chosen:
            self._results.setdefault(part_of(job), Result(part_of(job)))
        self._next_progress = time.monotonic() + PROGRESS_SECONDS

    def results(self) -> list[Result]:
        return list(self._results.values())

    def ended(self, finished: Finished) -> None:
        """Count the outcome of a job, and show its output at once if it failed."""
        job, code = finished.job, finished.exit_code
        result = self._results[part_of(job)]
        if code is None:
            result.failed += 1
            result.notes.append(f"{job.name} was left out: a build that it needs has failed")
            return
        result.add(finished)
        failed_before = result.failed
        if part_of(job) in SUITES:
            self._count(finished, result)
        else:
            result.passed += code == 0
            result.failed += code != 0
            result.files[job.name] = finished.seconds
            if code:
                result.notes.append(f"{job.name}: exit code {code}")
        failed = result.failed > failed_before
        state = "[red]failed[/]" if failed else "passed"
        console.print(f"{time.strftime('%H:%M:%S')} {state} {job.name}, {finished.seconds:.0f} s")
        if failed or part_of(job) in MUTANTS or part_of(job) == "compile":
            heading(job.name)
            print((REPORTS / f"{job.name}.log").read_text(errors="replace"), flush=True)

    def _count(self, finished: Finished, result: Result) -> None:
        job, code = finished.job, finished.exit_code
        before, failed_before = sum(result.files.values()), result.failed
        reported = read_junit(junit_of(job), result)
        if code == NO_TESTS:
            return
        result.starts.append(finished.seconds - (sum(result.files.values()) - before))
        if code and not (reported and result.failed > failed_before):
            result.failed += 1
            result.notes.append(f"pytest ended with exit code {code}; {current_test(job)}")

    def progress(self, running: list[Job]) -> None:
        """Tell from time to time what runs."""
        if time.monotonic() >= self._next_progress:
            self._next_progress = time.monotonic() + PROGRESS_SECONDS
            console.print(f"{time.strftime('%H:%M:%S')} {', '.join(map(current_test, running))}", markup=False)


def record(results: list[Result]) -> None:
    """Keep how long each file took, by part."""
    measured: dict[str, dict[str, float]] = {}
    for result in results:
        if result.files:
            # A file of which no test belongs to the part takes no time; one that is not recorded counts as the median.
            none = dict.fromkeys(test_files(), 0.0) if result.name in SUITES else {}
            measured[result.name] = none | result.files
        if result.starts:
            measured[result.name][durations.START] = sum(result.starts) / len(result.starts)
    durations.write(measured)
    console.print(f"recorded: {durations.FILE.relative_to(ROOT)}")


def gigabytes(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count else ""


def report_durations(results: list[Result]) -> None:
    """Write the duration of each test to a file, and show the longest ones: the next to shorten."""
    by_part = {result.name: result.durations for result in results if result.durations}
    if not by_part:
        return
    (REPORTS / "durations.json").write_text(json.dumps(by_part, indent=1))
    longest = sorted(((s, part, test) for part, tests in by_part.items() for test, s in tests.items()), reverse=True)
    table = Table("part", "test", "seconds", box=box.SIMPLE, title=f"the longest of {len(longest)}")
    for seconds, part, test in longest[:LONGEST]:
        table.add_row(part, test.rpartition(".")[2], f"{seconds:.0f}")
    console.print(table)
    console.print(f"All of them: {(REPORTS / 'durations.json').relative_to(ROOT)}")


def summarize(results: list[Result], started: float) -> int:
    """Print the table, the reason for each skip and the closing line; return the exit code."""
    report_durations(results)
    heading("summary")
    table = Table(box=box.SIMPLE)
    for column in ("part", "passed", "failed", "skipped", "time", "longest job", "peak memory"):
        table.add_column(column, justify="left" if column == "part" else "right")
    passed, failed = sum(r.passed for r in results), sum(r.failed for r in results)
    skipped = sum(r.skipped.total() for r in results)
    total = Result("total", passed, failed, seconds=time.monotonic() - started)
    total.longest = max((r.longest for r in results), default=0.0)
    total.peak_bytes = max((r.peak_bytes for r in results), default=0)
    for r in (*results, total):
        counts = (r.passed, r.failed, skipped if r is total else r.skipped.total())
        costs = (f"{r.seconds:.0f} s", f"{r.longest:.0f} s", gigabytes(r.peak_bytes))
        table.add_row(r.name, *map(str, counts), *costs, style="red" if r.failed else "")
    console.print(table)
    cores = len(os.sched_getaffinity(0))
    console.print(f"Python {platform.python_version()}, {cores} cores.")
    console.print("Time: the sum of a part's jobs; that of the whole run in the last line.")
    console.print("Memory: of a job's processes together, sampled every 5 seconds; the largest of the part.")
    for result in results:
        for reason, count in result.skipped.items():
            console.print(f"skipped in {result.name}, {count} times: {reason}", markup=False)
        for note in result.notes:
            console.print(f"FAILED in {result.name}: {note}", style="red", markup=False)
    print(f"{passed} passed, {failed} failed, {skipped} skipped", flush=True)
    return 1 if failed else 0


def minutes(seconds: float) -> str:
    return f"{seconds // 60:.0f} min {seconds % 60:02.0f} s"


def budget(chosen: list[Job]) -> Result:
    """Say how long the jobs should take; the result is a failure if they exceed what `make test` may take."""
    result = Result("budget")
    expected = jobs.expected_seconds(chosen, BUDGET_CORES) + SETUP_SECONDS
    console.print(
        f"Recorded durations: {minutes(expected)} on {BUDGET_CORES} cores from a clean clone; the budget is "
        f"{minutes(BUDGET_SECONDS)}."
    )
    result.passed = int(expected <= BUDGET_SECONDS)
    result.failed = 1 - result.passed
    if result.failed:
        result.notes.append("the recorded durations exceed the budget: shorten tests, or mark some as thorough")
    return result


def left_out(parts: list[str]) -> Iterator[Result]:
    """Say which parts need a compiler that is not there, and take them from the list."""
    if toolchain.find_clang(ROOT / "build") is None:
        for part in [part for part in parts if part in MUTANTS or SUITES.get(part, SUITES["fast"]).build == "tsan"]:
            parts.remove(part)
            result = Result(part)
            result.skip(toolchain.NO_CLANG)
            yield result


def main() -> int:
    started = time.monotonic()
    arguments = sys.argv[1:]
    split = arguments.index("--") if "--" in arguments else len(arguments)
    named, pytest_arguments = arguments[:split], arguments[split + 1 :]
    records = "--record" in named
    parts = [part for part in named if part != "--record"] or list(DEFAULT_PARTS)
    if unknown := [part for part in parts if part not in PARTS]:
        sys.exit(f"{__doc__}\nno such part: {', '.join(unknown)}; there are {', '.join(PARTS)}")
    os.chdir(ROOT)
    REPORTS.mkdir(parents=True, exist_ok=True)
    for old in REPORTS.iterdir():
        old.unlink()
    recorded = durations.read()
    skipped = list(left_out(parts))
    chosen = build_jobs(parts, recorded)
    for part in parts:
        chosen += jobs_of(part, recorded, pytest_arguments)
    checks = [budget(chosen)] if tuple(parts) == DEFAULT_PARTS and not pytest_arguments else []
    at_once = jobs.slots()
    console.print(f"{len(chosen)} jobs, {at_once} at a time; the output of each is in {REPORTS.relative_to(ROOT)}")
    run = Run(chosen)
    jobs.run(chosen, at_once, ROOT, REPORTS, run.ended, run.progress)
    if records:
        record(run.results())
    return summarize([*checks, *run.results(), *skipped], started)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (toolchain.BuildError, subprocess.CalledProcessError) as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit(130)
