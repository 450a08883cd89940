"""Build, test, check and time the library on a machine with a GPU, using the packages installed there, and report.

`make gpu-check` runs all steps within 9 minutes; `make gpu-check ARGS=--quick` runs fewer, within 3 minutes. Steps for
which no time is left are skipped, and the report says so.
`python scripts/gpu_check.py --only tests --only benchmark` runs only the named steps.

The first step is a canary: in 5 seconds it determines the undocumented behavior of this GPU and its driver, and which
kind of launch lets ranks that share the GPU run side by side in the other steps. Every step has a time limit, and a
failed step does not keep the next from running. The report is printed as a table and written to OUT/report.json; the
output of each step is in OUT/<step>.log.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

NEEDED = ("click", "rich", "torch", "pybind11", "pytest", "pytest_timeout", "hypothesis", "filelock", "cuda.core")


def lacking(names: tuple[str, ...]) -> list[str]:
    """Return the packages that this Python lacks."""
    return [
        name
        for name in names
        if importlib.util.find_spec(name.partition(".")[0]) is None or importlib.util.find_spec(name) is None
    ]


if absent := lacking(NEEDED):
    sys.exit(f"{sys.executable} lacks {', '.join(absent)}: pip install torch '.[test]', or set PYTHON=... to another")

import click  # noqa: E402 - only once the packages are known to exist
from rich import box  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
TAIL_LINES = 25
LAST_SECONDS = 5  # for a step that is interrupted
# Cases with 1, 2 and 4 ranks, and in rounds, from tests/support/cases.py; those of low-latency mode are from
# low_latency_gpu.py there.
SANITIZED_CASES = (
    *("one_rank_alone", "two_ranks", "uniform", "rounds_of_few_rows"),
    *("low_latency_one_rank", "low_latency_two_ranks", "low_latency_several_units"),
)
SANITIZED_QUICKLY = ("one_rank_alone", "two_ranks", "low_latency_two_ranks")
SANITIZERS = ("memcheck", "racecheck", "synccheck")
SIZES, LARGEST = "--tokens=128,1024,4096", "--tokens=4096"
# The options of each benchmark, and its environment variables.
BENCHMARKS: dict[str, tuple[list[str], dict[str, str]]] = {
    "benchmark": (["--num-sms=16", SIZES], {}),
    "low_latency_benchmark": (["--mode=low-latency", "--dtype=fp8", "--tokens=128"], {}),
    "fp8_benchmark": (["--num-sms=16", "--dtype=fp8", SIZES], {}),
    "vector_copies": (["--num-sms=16", LARGEST], {"DEEP_EP_COPIES": "vector"}),
    "pushed_combine": (["--num-sms=16", LARGEST], {"DEEP_EP_COMBINE": "push"}),
}
LAUNCH_VARIABLE = "DEEP_EP_LAUNCH"
# Hardware queues for ranks that share the GPU: effective only if set before a process starts.
FOR_ALL = {"PYTHONUNBUFFERED": "1", "DEEP_EP_REQUIRE_GPU": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "32"}
MEASURED = (*BENCHMARKS, "canary", "posting", "rates")  # steps that write their own JSON file


@dataclass(frozen=True)
class Step:
    """A command that passes or fails, with its time limit in seconds."""

    name: str
    command: list[str]
    seconds: int
    needs: str | None = None
    environment: dict[str, str] = field(default_factory=dict)
    shares: bool = False  # ranks on one GPU launch for themselves: their kernels must run side by side


@dataclass
class Outcome:
    """The outcome of a step."""

    name: str
    result: str  # passed, failed, too slow, skipped
    seconds: float = 0.0
    note: str = ""


def steps(out: Path, quick: bool) -> list[Step]:
    """Return the steps in order; those that depend only on the build are in order of usefulness."""
    python = sys.executable
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support")])
    # A kernel that never ends must not take the time of all tests.
    pytest = [
        python,
        "-m",
        "pytest",
        "-rs",
        "--durations=8",
        "--timeout=40",
        "--timeout-method=signal",
        "--maxfail=5",
        "-o",
        "addopts=",
    ]
    tests, low_latency = [*pytest, "tests/gpu/test_gpu.py"], [*pytest, "tests/gpu/test_low_latency.py"]
    elastic = [*pytest, "tests/gpu/test_elastic.py", "tests/gpu/test_eplb.py"]
    if quick:
        elastic += ["-k", "uniform or streams or graph or sums"]
        tests += ["-k", "uniform or two_ranks or rounds or graphs or async or recorded or failure or nic or fp8"]
        low_latency += ["-k", "two_ranks or top_11 or graphs or matmul or half or hook"]
    bench = [python, "-m", "deep_ep_py", "bench", "--device=cuda", "--ranks=8"]
    posting = [python, "-m", "deep_ep_py", "bench-posting", f"--json={out / 'posting.json'}"]
    found = [
        Step("build", [python, "setup.py", "--quiet", "build_ext", "--inplace"], 120),
        # Its result determines the kind of launch of the other steps.
        Step("canary", [python, "-m", "deep_ep_py", "canary", f"--json={out / 'canary.json'}"], 70),
        Step("kernels", [python, "-m", "deep_ep_py", "compile", "--all"], 60),
        Step("tests", tests, 60 if quick else 150, shares=True),
        Step("low_latency_tests", low_latency, 40 if quick else 90, shares=True),
        Step("elastic_tests", elastic, 40 if quick else 90, shares=True),
        Step("moe_tests", [*pytest, "tests/gpu/test_moe.py"], 60),
    ]
    for name, (options, environment) in BENCHMARKS.items():
        files = [f"--json={out / f'{name}.json'}", f"--plot={out / f'{name}.png'}"]
        options = [LARGEST if quick and option == SIZES else option for option in options]
        limit = 120 if SIZES in options else 60
        found.append(Step(name, [*bench, *options, *files], limit, environment=environment, shares=True))
    found.append(Step("posting", posting, 30))
    # A dry run: if the rates were kept, a Buffer on such a GPU would choose its number of blocks by them.
    found.append(Step("rates", [python, "-m", "deep_ep_py", "rates", "--dry-run", f"--json={out / 'rates.json'}"], 40))
    # A sanitizer may serialize kernels, so all ranks of a case go to the GPU in one launch.
    for tool in SANITIZERS[: 1 if quick else None]:
        command = ["compute-sanitizer", f"--tool={tool}", "--error-exitcode=9", "--print-limit=10"]
        command += [python, "tests/workers/gpu_case.py", *(SANITIZED_QUICKLY if quick else SANITIZED_CASES)]
        found.append(Step(tool, command, 30 if quick else 90, "compute-sanitizer", {"PYTHONPATH": paths}))
    return found


def run(step: Step, out: Path, console: Console) -> Outcome:
    """Run a step; its output goes to a file, and if it fails, the end of the output also goes to the console."""
    console.rule(f"[bold]{step.name}")
    if step.needs is not None and shutil.which(step.needs) is None:
        console.print(f"[yellow]skipped: there is no {step.needs}")
        return Outcome(step.name, "skipped", note=f"there is no {step.needs}")
    log = out / f"{step.name}.log"
    began = time.monotonic()
    environment = {**os.environ, **FOR_ALL, **step.environment}
    with log.open("w") as file:
        process = subprocess.Popen(
            step.command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(step.seconds)
            result, note = ("passed", "") if code == 0 else ("failed", f"exit code {code}")
        except subprocess.TimeoutExpired:
            result, note = "too slow", f"unfinished after {step.seconds} s"
            process.send_signal(signal.SIGINT)  # pytest then reports what has failed so far
            with suppress(subprocess.TimeoutExpired):
                process.wait(LAST_SECONDS)
        finally:
            with suppress(ProcessLookupError):  # and all its children, which would keep using the GPU
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    lines = log.read_text(errors="replace").splitlines()
    if step.name in ("tests", "low_latency_tests", "moe_tests", "kernels", *MEASURED) or result != "passed":
        console.print("\n".join(lines[-(TAIL_LINES if result == "passed" else 3 * TAIL_LINES) :]), markup=False)
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return Outcome(step.name, result, round(time.monotonic() - began, 1), note or last[:100])


def describe() -> dict[str, Any]:
    """Describe the machine."""
    import torch

    found: dict[str, Any] = {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "kernel": platform.release(),
        "cores": len(os.sched_getaffinity(0)),
    }
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    for name, command in (("gpu", query), ("commit", ["git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"])):
        try:
            found[name] = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
        except (OSError, subprocess.SubprocessError):
            found[name] = None
    return found


def as_table(outcomes: list[Outcome]) -> Table:
    """Return the report as a table."""
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("step")
    table.add_column("result")
    table.add_column("seconds", justify="right")
    table.add_column("note", overflow="fold")
    colors = {"passed": "green", "skipped": "yellow"}
    for outcome in outcomes:
        color = colors.get(outcome.result, "red")
        table.add_row(outcome.name, f"[{color}]{outcome.result}[/]", f"{outcome.seconds:.0f}", outcome.note)
    return table


def launches_by(kind: str | None) -> dict[str, str]:
    """Return the variable that selects the kind of launch the canary found to work, unless it is already set."""
    return {} if kind is None or LAUNCH_VARIABLE in os.environ else {LAUNCH_VARIABLE: kind}


@click.command(context_settings={"help_option_names": ["-h", "--help"]}, help=__doc__)
@click.option("--quick", is_flag=True, help="Within 3 minutes.")
@click.option("--only", multiple=True, metavar="STEP", help="Run only this step; repeatable.")
@click.option(
    "--out", type=click.Path(file_okay=False, path_type=Path), default=Path("out/gpu_check"), show_default=True
)
def main(quick: bool, only: tuple[str, ...], out: Path) -> None:
    """Run the steps and report; the exit code is 1 if a step has not passed."""
    out = out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    chosen = steps(out, quick)
    names = [step.name for step in chosen]
    for name in only:
        if name not in names:
            raise click.UsageError(f"--only {name}: expected one of {'; '.join(names)}")
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    machine = describe()
    console.print(machine)
    if machine["gpu"] is None:
        raise click.ClickException("there is no GPU here, or no nvidia-smi to say so")
    deadline = time.monotonic() + (180 if quick else 540)
    for name in MEASURED:
        (out / f"{name}.json").unlink(missing_ok=True)  # from an earlier run
    outcomes: list[Outcome] = []

    def measured(name: str) -> Any:
        file = out / f"{name}.json"
        return json.loads(file.read_text()) if file.exists() else None

    launches: dict[str, str] = {}
    side_by_side = True
    for step in chosen:
        if only and step.name not in only:
            continue
        left = int(deadline - time.monotonic())
        if left < 5:
            outcomes.append(Outcome(step.name, "skipped", note="no time was left"))
            continue
        if step.shares and not side_by_side:
            outcomes.append(Outcome(step.name, "skipped", note="ranks cannot share this GPU: see the canary"))
            continue
        environment = {**launches, **step.environment}
        outcomes.append(run(replace(step, seconds=min(step.seconds, left), environment=environment), out, console))
        if step.name == "build" and outcomes[-1].result != "passed":
            break
        if step.name == "canary" and (found := measured("canary")) is not None and "side_by_side" in found:
            side_by_side = found["launch"] is not None
            launches = launches_by(found["launch"])

    report = {
        "machine": machine,
        "steps": [asdict(outcome) for outcome in outcomes],
        **{name: measured(name) for name in MEASURED},
    }
    (out / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    console.print(as_table(outcomes))
    console.print(f"report: {out / 'report.json'}")
    if any(outcome.result in ("failed", "too slow") for outcome in outcomes):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
