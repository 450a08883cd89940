"""`python -m deep_ep_py doctor`: what this machine can do, and why not more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from rich.console import Console

from deep_ep_py.core.files import write_json
from deep_ep_py.doctor.examine import examine
from deep_ep_py.doctor.files import Files
from deep_ep_py.doctor.findings import Verdict, worst
from deep_ep_py.doctor.job import Job, examine_job, is_one_of_several
from deep_ep_py.doctor.printed import print_job, print_sections


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Also write the report here."
)
@click.option(
    "--root",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    default=Path("/"),
    show_default=True,
    help="Read /proc, /sys and /dev below this folder: a copy of another machine's.",
)
@click.option("--measure", is_flag=True, help="Under torchrun: also time the path between each two ranks.")
def command(json_file: Path | None, root: Path, measure: bool) -> None:
    """Say what this machine can do for dispatch and combine, and why not more.

    Each line has a verdict, what was read, why it matters, and behind > what to do about it. Verdicts: good;
    info, neither good nor bad; absent, not on this machine, and nothing is wrong; warning; error. The exit code is 1
    if there is an error. Of a copy, software and paths are left out.

    Under torchrun rank 0 reports for all: each machine, and the path that rows would take between each two ranks.
    """
    files, console = Files(root), Console()
    if measure and not (files.live and is_one_of_several()):
        raise click.UsageError("--measure: expected several ranks, under torchrun, and no --root")
    sections = examine(files)
    if files.live and is_one_of_several():
        _report_job(examine_job(sections, measure), json_file, console)
        return
    print_sections(sections, console)
    _write(json_file, {"sections": [section.as_json() for section in sections]})
    if worst(sections) is Verdict.ERROR:
        raise SystemExit(1)


def _report_job(job: Job | None, json_file: Path | None, console: Console) -> None:
    """Rank 0 reports for all."""
    if job is None:
        return
    print_job(job, console)
    _write(json_file, job.as_json())
    if job.failure or any(worst(machine.sections) is Verdict.ERROR for machine in job.machines):
        raise SystemExit(1)


def _write(json_file: Path | None, report: dict[str, Any]) -> None:
    if json_file is None:
        return
    try:
        write_json(json_file, report)
    except OSError as error:
        raise click.ClickException(f"--json {json_file}: {error.strerror}") from None
