"""Run the parts of `make test` and summarize them.

    python scripts/run_tests.py [PART ...] [-- PYTEST ARGUMENTS]

The default parts are lint; timed, the tests in the fast build that measure time; fast, asan and races, the other tests
of these builds; and mutants, a few planted bugs in the order of memory accesses or of steps. If no part is named, all
of these run, the tests of the builds two parts at a time. Other parts run only if named: exact, whose code and tests
are also in asan, which checks more; compile, the report of the GPU kernels; quick and quick-exact, the short tests with
few schedules; long, hundreds of kills and stalls and a soak; many and many-exact, the schedule tests with five times as
many schedules; values, steps and silent, all planted bugs: those in values, those in the order of steps, and those that
are races and must leave all values right when no race occurs. With pytest arguments a part runs the tests that they
select: `run_tests.py races -- tests/normal/test_layout.py -k empty`.
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
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

import measure
import native_build
import sanitizers
import toolchain

ROOT = native_build.ROOT
REPORTS = ROOT / "build" / "reports"
PYTEST = [sys.executable, "-m", "pytest", "-p", "pytest_sanitizers", "-rsfE"]

# The build and the pytest arguments of each part. A sanitizer that ends the process writes to stderr directly, so asan
# does not capture the file descriptor.
SUITES = {
    "timed": ("fast", ["-m", "timed"]),
    "fast": ("fast", ["-m", "not timed"]),
    "exact": ("exact", ["-m", "not once"]),
    "asan": ("asan", ["-m", "not once", "--capture=sys"]),
    "races": ("tsan", ["-m", "not once"]),
    "quick": ("fast", ["-m", "not timed and not slow"]),
    "quick-exact": ("exact", ["-m", "not once and not timed and not slow"]),
    "long": ("fast", ["-m", "long"]),
    "many": ("fast", ["-m", "not once and not timed"]),
    "many-exact": ("exact", ["-m", "not once and not timed"]),
}
# Parts that plant bugs, and their arguments for scripts/mutants.py. Each bug costs the compilation of a program: a few
# show that the tests still catch bugs; trying all of them is left to the long suite.
MUTANTS = {
    "mutants": ["--build", "exact", "--build", "tsan", "--few"],
    "steps": ["--build", "exact"],
    "values": ["--build", "fast"],
    "silent": ["--build", "tsan", "--silent"],
}
# Environment variables that tests/support/builds.py reads.
SETTINGS = {
    "quick": "DEEP_EP_QUICK",
    "quick-exact": "DEEP_EP_QUICK",
    "long": "DEEP_EP_LONG",
    "many": "DEEP_EP_LONG",
    "many-exact": "DEEP_EP_LONG",
}
# Tests of up to an hour, which print their progress.
LONG_OPTIONS = ["--capture=no", "-v", "-o", "timeout=5400", "-o", "faulthandler_timeout=5430"]
# Parts that keep one core busy each, longest first. All other parts have the machine to themselves.
TOGETHER = (
    "many-exact",
    "many",
    "silent",
    "values",
    "steps",
    "fast",
    "mutants",
    "races",
    "asan",
    "exact",
    "quick-exact",
    "quick",
)
AT_ONCE = min(2, len(os.sched_getaffinity(0)))
PROGRESS_SECONDS = 30.0
LONGEST = 12
NO_TESTS = 5  # an exit code of pytest
COMPILE_ARCHITECTURES = ("sm_90a", "sm_100a")
DEFAULT_PARTS = ("lint", "timed", "fast", "asan", "races", "mutants")
PARTS = tuple(dict.fromkeys((*DEFAULT_PARTS, *SUITES, *MUTANTS, "compile")))

console = Console(highlight=False, soft_wrap=True)


@dataclass
class Result:
    """One line of the summary."""

    name: str
    passed: int = 0
    failed: int = 0
    skipped: Counter[str] = field(default_factory=Counter)  # by reason
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0
    peak_bytes: int = 0
    durations: dict[str, float] = field(default_factory=dict)  # by test

    def run(self, command: list[str], environment: dict[str, str] | None = None, log: Path | None = None) -> int:
        """Run one command of the part, with its output sent to `log` if given, and return its exit code."""
        measured = measure.run(command, ROOT, environment, log)
        self.seconds += measured.seconds
        self.peak_bytes = max(self.peak_bytes, measured.peak_bytes)
        return measured.exit_code

    def check(
        self, name: str, command: list[str], environment: dict[str, str] | None = None, log: Path | None = None
    ) -> bool:
        """Run a command that passes or fails as a whole."""
        code = self.run(command, environment, log)
        self.passed += code == 0
        self.failed += code != 0
        if code:
            self.notes.append(f"{name}: exit code {code}")
        return code == 0

    def skip(self, reason: str) -> None:
        self.skipped[reason] += 1
        console.print(f"[yellow]{self.name} skipped: {reason}")


def heading(text: str) -> None:
    console.rule(f"[bold]{text}")


def lint() -> Result:
    """Run the style and type checks."""
    heading("lint")
    result = Result("lint")
    folders = (ROOT / "benchmarks", ROOT / "csrc", ROOT / "tests" / "native")
    native = sorted(
        str(path.relative_to(ROOT)) for f in folders for path in f.rglob("*.*") if path.suffix in (".cu", ".h", ".cpp")
    )
    clang_format = [sys.executable, "-c", "import clang_format; clang_format.clang_format()"]
    result.check("ruff format", [sys.executable, "-m", "ruff", "format", "--check", "--quiet", "--diff", "."])
    result.check("ruff check", [sys.executable, "-m", "ruff", "check", "--quiet", "."])
    result.check("clang-format", [*clang_format, "--dry-run", "-Werror", *native])
    result.check("mypy", [sys.executable, "-m", "mypy"])
    return result


def compile_report() -> Result:
    """Report the registers, shared memory and spills of the kernels, according to NVRTC."""
    result = Result("compile")
    for architecture in COMPILE_ARCHITECTURES:
        heading(f"kernels for {architecture}")
        command = [sys.executable, "-m", "deep_ep_py", "compile", "--all", "--fresh", "--arch", architecture]
        result.check(architecture, command, {"DEEP_EP_BUILD": "fast"})
    return result


def mutants(part: str, log: Path | None) -> Result:
    """Plant the bugs, each of which must be caught: one at a time if another part is using the other core."""
    result = Result(part)
    environment = {} if log is None else {"DEEP_EP_JOBS": "1"}
    result.check("mutants", [sys.executable, "scripts/mutants.py", *MUTANTS[part]], environment, log)
    return result


def build(names: list[str]) -> Result:
    """Compile the named variants in place."""
    heading(f"build {', '.join(names)}")
    result = Result("build")
    for name in names:
        command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
        result.check(name, command, {"DEEP_EP_BUILDS": name})
    return result


def read_junit(path: Path, result: Result) -> bool:
    """Add the counts of a pytest report; return False if pytest died before it wrote the report."""
    if not path.exists():
        return False
    for case in ElementTree.parse(path).iter("testcase"):
        result.durations[f"{case.get('classname')}::{case.get('name')}"] = float(case.get("time", 0))
        skipped = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            result.failed += 1
        elif skipped is not None:
            result.skipped[skipped.get("message", "no reason given")] += 1
        else:
            result.passed += 1
    return True


def current_test(part: str) -> str:
    """Return the test of the part that is running or ran last."""
    if part not in SUITES:
        return part
    path = REPORTS / f"{part}.current"
    return f"{part} at {path.read_text() if path.exists() else 'its beginning'}"


def suite(part: str, arguments: list[str], log: Path | None) -> Result:
    """Run pytest in one build."""
    name, selection = SUITES[part]
    result = Result(part)
    junit, current = REPORTS / f"{part}.xml", REPORTS / f"{part}.current"
    junit.unlink(missing_ok=True)
    current.unlink(missing_ok=True)
    environment = sanitizers.environment(native_build.VARIANTS[name])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT / "scripts"), os.environ.get("PYTHONPATH", "")]))
    environment["DEEP_EP_CURRENT_TEST"] = str(current)
    options = LONG_OPTIONS if part == "long" else []
    if part in SETTINGS:
        environment[SETTINGS[part]] = "1"
        arguments = [*selection, *arguments]  # both together may select no test
    code = result.run([*PYTEST, f"--junitxml={junit}", *options, *(arguments or selection)], environment, log)
    reported = read_junit(junit, result)
    if code == NO_TESTS and part in SETTINGS:
        return result
    if code and not (reported and result.failed):
        result.failed += 1
        result.notes.append(f"pytest ended with exit code {code}; {current_test(part)}")
    return result


def title(part: str) -> str:
    return f"{part}: tests in the {SUITES[part][0]} build" if part in SUITES else part


def suites(parts: list[str], arguments: list[str]) -> list[Result]:
    """Run pytest in several builds, and the mutants: first the parts that need the machine alone, then the others."""

    def run(part: str, log: Path | None) -> Result:
        return mutants(part, log) if part in MUTANTS else suite(part, arguments, log)

    together = [part for part in TOGETHER if part in parts]
    if len(together) < 2:
        together = []
    results = []
    for part in parts:
        if part not in together:
            heading(title(part))
            results.append(run(part, None))
    logs = {part: REPORTS / f"{part}.log" for part in together}
    if together:
        heading(f"{', '.join(together)}: {AT_ONCE} at a time; the output of each is shown when it ends")
    with ThreadPoolExecutor(AT_ONCE) as pool:
        futures = {pool.submit(run, part, logs[part]): part for part in together}
        pending = set(futures)
        while pending:
            done, pending = wait(pending, PROGRESS_SECONDS, FIRST_COMPLETED)
            for future in done:
                part = futures[future]
                heading(title(part))
                print(logs[part].read_text(errors="replace"), flush=True)
                results.append(future.result())
            if not done:
                at = [current_test(futures[future]) for future in pending if future.running()]
                console.print(f"{time.strftime('%H:%M:%S')} {', '.join(sorted(at))}", markup=False)
    return sorted(results, key=lambda result: parts.index(result.name))


def gigabytes(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count else ""


def report_durations(results: list[Result]) -> None:
    """Write the duration of each test to a file, and show the longest ones: the next to shorten."""
    durations = {result.name: result.durations for result in results if result.durations}
    if not durations:
        return
    (REPORTS / "durations.json").write_text(json.dumps(durations, indent=1))
    longest = sorted(((s, part, test) for part, tests in durations.items() for test, s in tests.items()), reverse=True)
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
    for column in ("part", "passed", "failed", "skipped", "time", "peak memory"):
        table.add_column(column, justify="left" if column == "part" else "right")
    passed, failed = sum(r.passed for r in results), sum(r.failed for r in results)
    skipped = sum(r.skipped.total() for r in results)
    seconds, peak = time.monotonic() - started, max(r.peak_bytes for r in results)
    rows = [(r.name, r.passed, r.failed, r.skipped.total(), r.seconds, r.peak_bytes) for r in results]
    for row in (*rows, ("total", passed, failed, skipped, seconds, peak)):
        table.add_row(*map(str, row[:4]), f"{row[4]:.0f} s", gigabytes(row[5]), style="red" if row[2] else "")
    console.print(table)
    cores = len(os.sched_getaffinity(0))
    console.print(f"Python {platform.python_version()}, {cores} cores.")
    console.print("Memory: total of all processes of a part, sampled every second; the last line is the largest part.")
    for result in results:
        for reason, count in result.skipped.items():
            console.print(f"skipped in {result.name}, {count} times: {reason}", markup=False)
        for note in result.notes:
            console.print(f"FAILED in {result.name}: {note}", style="red", markup=False)
    print(f"{passed} passed, {failed} failed, {skipped} skipped", flush=True)
    return 1 if failed else 0


def main() -> int:
    started = time.monotonic()
    arguments = sys.argv[1:]
    split = arguments.index("--") if "--" in arguments else len(arguments)
    parts, pytest_arguments = arguments[:split] or list(DEFAULT_PARTS), arguments[split + 1 :]
    if unknown := [part for part in parts if part not in PARTS]:
        sys.exit(f"{__doc__}\nno such part: {', '.join(unknown)}; there are {', '.join(PARTS)}")
    os.chdir(ROOT)
    REPORTS.mkdir(parents=True, exist_ok=True)
    results = [lint()] if "lint" in parts else []
    left_out = []
    for part in ("races", *MUTANTS):
        if part in parts and toolchain.find_clang(ROOT / "build") is None:
            left_out.append(Result(part))
            left_out[-1].skip(toolchain.NO_CLANG)
            parts = [other for other in parts if other != part]
    builds = list(dict.fromkeys(SUITES[part][0] for part in parts if part in SUITES))
    if "compile" in parts and "fast" not in builds:
        builds.insert(0, "fast")
    if builds:
        results.append(build(builds))
        if results[-1].failed:
            return summarize(results, started)
    if "compile" in parts:
        results.append(compile_report())
    results += suites([part for part in parts if part in SUITES or part in MUTANTS], pytest_arguments)
    return summarize([*results, *left_out], started)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (toolchain.BuildError, subprocess.CalledProcessError) as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit(130)
