"""`python -m deep_ep_py doctor`: what this machine can do, and what limits it."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import click
from rich.console import Console

from deep_ep_py.base.files import check_writable, write_json
from deep_ep_py.base.machine_files import Files
from deep_ep_py.tools.doctor.examine import examine
from deep_ep_py.tools.doctor.findings import Verdict, worst
from deep_ep_py.tools.doctor.job import Job, Machine, examine_job, is_one_of_several
from deep_ep_py.tools.doctor.printed import print_job

_STDOUT = Path("-")


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--json",
    "json_file",
    is_flag=False,
    flag_value=str(_STDOUT),
    metavar="[FILE]",
    type=click.Path(dir_okay=False, allow_dash=True, path_type=Path),
    help="Print the report as JSON; with FILE, write the JSON there and also print the report for people.",
)
@click.option(
    "--root",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    default=Path("/"),
    show_default=True,
    help="Read /proc, /sys, /dev and /etc below this folder, a copy from another machine.",
)
@click.option("--measure", is_flag=True, help="Under torchrun: also time the path between every two ranks.")
def command(json_file: Path | None, root: Path, measure: bool) -> None:
    """Report what this machine can do for dispatch and combine, and what limits it.

    Each line has a verdict, what was read, why it matters, and what to do about it; a line by itself is the command
    for that. Verdicts: good; info (neither good nor bad); absent (not on this machine, which is fine); warning; error.
    The exit code is 1 if there is an error. The last section says what can be run here, and what is in the way of the
    rest. With --root, everything that belongs to a process is left out: limits, environment, packages, paths, what can
    be run.

    Under torchrun rank 0 reports for all: each machine, and the path that rows would take between every two ranks.
    """
    live = root.resolve() == Path("/")
    several = live and is_one_of_several()
    if json_file not in (None, _STDOUT):
        try:
            check_writable(json_file)
        except OSError as error:
            raise click.ClickException(f"--json {json_file} cannot be written: {error.strerror}") from None
    if measure and not several:
        raise click.UsageError("--measure: expected several ranks, under torchrun, and no --root")
    files = Files(root, live)
    sections = examine(files)
    if several:
        job = examine_job(sections, measure)
        if job is None:  # rank 0 reports for all
            return
    else:
        name = socket.gethostname() if live else files.text("/proc/sys/kernel/hostname") or ""
        job = Job([Machine(name, sections=sections)], routes=[], pairs=[], failure="")
    _report(job, json_file)
    if job.failure or any(worst(machine.sections) is Verdict.ERROR for machine in job.machines):
        raise SystemExit(1)


def _report(job: Job, json_file: Path | None) -> None:
    if json_file == _STDOUT:
        click.echo(json.dumps(job.as_json(), indent=2))
        return
    failed = ""
    if json_file is not None:  # first, because the reader of what is printed may stop reading
        try:
            write_json(json_file, job.as_json())
        except OSError as error:
            failed = f"--json {json_file}: {error.strerror}"
    print_job(job, Console(highlight=False))
    if failed:
        raise click.ClickException(failed)
