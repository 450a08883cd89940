"""The report for people."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from deep_ep_py.doctor.findings import Finding, Section, Verdict
from deep_ep_py.doctor.job import Job, legend, matrix
from deep_ep_py.doctor.measured import HOW_MEASURED, Pair, Summary, summarize

_STYLES = {
    Verdict.GOOD: "green",
    Verdict.INFO: "default",
    Verdict.ABSENT: "dim",
    Verdict.WARNING: "yellow",
    Verdict.ERROR: "bold red",
}


def print_job(job: Job, console: Console) -> None:
    """Print what was found of each machine, and the paths between ranks."""
    for machine in job.machines:
        console.rule(Text(f"{machine.name}: ranks {', '.join(map(str, machine.ranks))}"), align="left")
        print_sections(machine.sections, console)
        console.print()
    console.rule(Text("Paths between ranks"), align="left")
    if job.failure:
        console.print(Text("No Buffer could be made, or measured.", style=_STYLES[Verdict.ERROR]))
        console.print(Text(job.failure))
        return
    for line in matrix(job):
        console.print(Text(f"  {line}"))
    console.print(Text(f"  {legend(job)}", style="dim"))
    if job.pairs:
        console.print(_measured(summarize(job.pairs)))
        console.print(Text(HOW_MEASURED, style="dim"))


def _measured(summaries: Sequence[Summary]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("path")
    for name in ("GB/s", "slowest pair", "one row, ms", "slowest pair"):
        table.add_column(name, justify="right")
    for one in summaries:
        rates = f"{one.gb_per_s:.3g}", f"{one.slowest.gb_per_s:.3g} ({_names(one.slowest)})"
        times = f"{one.us / 1e3:.3g}", f"{one.latest.us / 1e3:.3g} ({_names(one.latest)})"
        table.add_row(one.path, *rates, *times)
    return table


def _names(pair: Pair) -> str:
    return f"{pair.source} to {pair.destination}"


def print_sections(sections: Sequence[Section], console: Console) -> None:
    """Print all findings: verdict, name, and what was read with the reason and the advice below it."""
    for section in sections:
        console.print(Text(section.title, style="bold"))
        names = max((len(finding.name) for finding in section.findings), default=0)
        table = Table.grid(padding=(0, 1))
        table.add_column(width=9)
        table.add_column(width=min(names, 26))
        table.add_column(overflow="fold")
        for finding in section.findings:
            table.add_row(*_row(finding))
        console.print(table)
        console.print()
    console.print(_summary(sections))


def _row(finding: Finding) -> tuple[Text, Text, Text]:
    said = Text(finding.value)
    if finding.reason:
        said.append(f"\n{finding.reason}", style="dim")
    if finding.advice:
        said.append(f"\n> {finding.advice}", style="cyan")
    return Text(f"  {finding.verdict.value}", style=_STYLES[finding.verdict]), Text(finding.name), said


def _summary(sections: Sequence[Section]) -> Text:
    verdicts = [finding.verdict for section in sections for finding in section.findings]
    errors, warnings = verdicts.count(Verdict.ERROR), verdicts.count(Verdict.WARNING)
    style = _STYLES[Verdict.ERROR if errors else Verdict.WARNING if warnings else Verdict.GOOD]
    return Text(f"{_count(errors, 'error')}, {_count(warnings, 'warning')}", style=style)


def _count(count: int, of: str) -> str:
    return f"{count or 'no'} {of}{'' if count == 1 else 's'}"
