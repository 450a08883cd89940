"""Ask a machine with a GPU what only a GPU can tell: experiments in the order of their worth, within five minutes.

Each experiment has a time limit of its own; one that fails or is too slow does not keep the next from running. Results
are kept in OUT as they come, one file each, and report.md and report.json say what is known so far, also when the run
is interrupted. A second run with the same OUT continues with what has no result yet for these sources on such a
machine. What does not fit the default list is run by name.

The packages of this Python are used, and no network. On a machine with several GPUs, a process per GPU tries the links
between them first.
"""

from __future__ import annotations

import importlib.util
import signal
import sys
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
from rich.console import Console  # noqa: E402

from benchmarks.gpu_lab import report  # noqa: E402
from benchmarks.gpu_lab.against import pairs_with  # noqa: E402
from benchmarks.gpu_lab.experiments import Experiment, experiments  # noqa: E402
from benchmarks.gpu_lab.machine import describe  # noqa: E402
from benchmarks.gpu_lab.runner import FAILED, PASSED, TOO_SLOW, Result, Runner  # noqa: E402

FIRST = ("build", "canary")
"""What all others depend on."""


def chosen_of(known: list[Experiment], only: tuple[str, ...], gpus: int) -> list[Experiment]:
    """Return the experiments to run: the default list, or those that are named and what these depend on."""
    names = [one.name for one in known]
    for name in only:
        if name not in names:
            raise click.UsageError(f"--only {name}: expected one of {'; '.join(names)}")
    if only:
        return [one for one in known if one.name in (*FIRST, *only)]
    return [one for one in known if one.in_default_list(gpus)]


def run_all(runner: Runner, chosen: list[Experiment], again: set[str], keep_report: Any) -> None:
    """Run what has no result yet, or is to be run again; stop if an extension cannot be built."""
    for experiment in chosen:
        kept = runner.kept(experiment.name)
        # A build takes a second where there is nothing to do, and the folder may have come from another machine.
        builds = experiment.name == "build" or experiment.name.endswith("_build")
        if kept is None or experiment.name in again or builds:
            kept = runner.run(experiment)
            keep_report()
        if builds and kept["result"] != PASSED:
            return


def _interrupt(number: int, frame: Any) -> None:
    raise KeyboardInterrupt


@click.command(context_settings={"help_option_names": ["-h", "--help"]}, help=__doc__)
@click.option("--only", multiple=True, metavar="NAME", help="Run only this experiment, again; repeatable.")
@click.option("--fresh", is_flag=True, help="Run everything again.")
@click.option(
    "--against",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="FOLDER",
    help="Instead, build the sources in this folder too, such as `git archive` exports, and run benchmarks of both by "
    "turns.",
)
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=Path("out/gpu_lab"), show_default=True)
def main(only: tuple[str, ...], fresh: bool, against: Path | None, out: Path) -> None:
    """Run experiments and report; the exit code is 1 if one has failed."""
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    machine = describe()
    if machine is None:
        raise click.ClickException("there is no GPU here, or no nvidia-smi to say so")
    pairs = [] if against is None else pairs_with(against.resolve(), machine.gpus)
    known = [*experiments(machine.gpus), *pairs]
    chosen = chosen_of(known, only or tuple(one.name for one in pairs), machine.gpus)
    out = out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    console.print(machine)
    runner = Runner(machine, out, console)

    def results() -> list[Result]:
        found = [runner.result_of(one.name) for one in known]
        return [result for result in found if result is not None]

    def keep_report() -> None:
        report.write(machine, results(), [one.name for one in chosen], out)

    signal.signal(signal.SIGTERM, _interrupt)
    again = {one.name for one in chosen} if fresh else set(only)
    try:
        run_all(runner, chosen, again, keep_report)
    except KeyboardInterrupt:
        console.print("[yellow]interrupted: the same command continues")
        raise SystemExit(130) from None
    finally:
        keep_report()
        console.print(report.as_table(results()))
        console.print(f"report: {out / 'report.md'}")
    mine = [result for result in results() if result["name"] in {one.name for one in chosen}]
    if any(result["result"] in (FAILED, TOO_SLOW) for result in mine):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
