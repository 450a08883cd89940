#!/usr/bin/env python3
"""Weaken each line that orders memory by one step, in the PTX of all kernels, and report which test notices it, or why
none needs to.

Needs NVRTC and the build whose warps have 32 threads: DEEP_EP_BUILD=exact python scripts/weaken_ptx.py
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import click
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

from deep_ep_py.base.files import write_json  # noqa: E402
from ptx_arguments import argument_for  # noqa: E402
from ptx_mutants import RecordingImages, catch, look  # noqa: E402


@click.command(context_settings={"show_default": True, "help_option_names": ["-h", "--help"]})
@click.option("--only", default="", help="Only mutants whose printed form contains this text.")
@click.option(
    "--missed",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Only mutants that were not noticed in the run that wrote this file with --json.",
)
@click.option("--part", default="1/1", help="The share of this process: 2/3 is the second of three.")
@click.option("--seconds", type=click.FloatRange(0), default=2.0, help="Time limit of each workload, for each mutant.")
@click.option("--arch", "architecture", default="sm_90a")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Also write results here.")
def main(only: str, missed: Path | None, part: str, seconds: float, architecture: str, json_file: Path | None) -> None:
    """Weaken each line that orders memory, and print the mutants that no test notices. The exit code is 1 if
    tests/support/ptx_arguments.py has no argument for one of them.
    """
    which, _, parts = part.partition("/")
    if not (which.isdigit() and parts.isdigit() and 1 <= int(which) <= int(parts)):
        raise click.BadParameter(f"{part!r}: expected a share such as 2/3", param_hint="--part")
    images = RecordingImages(architecture)
    found = look(images)
    for idiom in sorted(set(found.statements) - set(found.workloads)):
        click.echo(f"not executed: {idiom}")
    mutants = [mutant for mutant in found.mutants() if only in str(mutant)]
    if missed is not None:
        before = json.loads(missed.read_text())
        mutants = [mutant for mutant in mutants if not before.get(str(mutant))]
    mutants = mutants[int(which) - 1 :: int(parts)]
    results: dict[str, str] = {}
    bare: list[str] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, transient=True, disable=not sys.stdout.isatty()) as progress:
        task = progress.add_task("mutants", total=len(mutants))
        for mutant in mutants:
            begun = time.monotonic()
            results[str(mutant)] = noticed = catch(images, found, mutant, seconds)
            taken = f"{time.monotonic() - begun:.1f} s"
            argument = argument_for(mutant)
            verdict = "noticed" if noticed else "argued" if argument else "NOT NOTICED"
            progress.print(f"{verdict} ({taken}): {mutant} <- {noticed or argument}", soft_wrap=True)
            if verdict == "NOT NOTICED":
                bare.append(str(mutant))
            progress.advance(task)
    noticed_ones = sum(bool(noticed) for noticed in results.values())
    click.echo(f"{noticed_ones} of {len(results)} were noticed, {len(bare)} lack an argument")
    if json_file is not None:
        write_json(json_file, results)
    if bare:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
