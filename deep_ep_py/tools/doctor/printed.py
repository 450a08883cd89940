"""The printed report."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from deep_ep_py.tools.doctor.findings import Finding, Section, Verdict, count
from deep_ep_py.tools.doctor.job import Job
from deep_ep_py.tools.doctor.measured import HOW_MEASURED, Pair, Summary, summarize
from deep_ep_py.transport.topology.matrix import matrix, ranks_text

_STYLES = {
    Verdict.GOOD: "green",
    Verdict.INFO: "default",
    Verdict.ABSENT: "dim",
    Verdict.WARNING: "yellow",
    Verdict.ERROR: "bold red",
}
_COMMAND = "cyan"
_INDENT = "  "
_BELOW = 6 * _INDENT
COMMAND_INDENT = 8 * _INDENT
"""Indentation of a command, which has a line of its own, however long."""
_MAX_NAME = 26


def print_job(job: Job, console: Console) -> None:
    """Print the findings on each machine, and the paths between ranks."""
    for machine in job.machines:
        if machine.ranks:
            title = printable(f"{machine.name}: {ranks_text(machine.ranks)}", console)
            console.rule(Text(title), align="left")
        _print_sections(machine.sections, console)
    if job.failure:
        console.rule(Text("Paths between ranks"), align="left")
        console.print(Text("No Buffer could be made, or measured.", style=_STYLES[Verdict.ERROR]))
        for line in job.failure.splitlines():
            console.print(Text(printable(line, console)))
    elif job.routes:
        console.rule(Text("Paths between ranks"), align="left")
        machines = [(machine.name, machine.ranks) for machine in job.machines]
        for line in matrix(job.routes, machines, console.width - len(_INDENT)):
            console.print(Text(_INDENT + printable(line, console)))
        for line in job.gpus:
            console.print(Text(printable(line, console)))
    if job.pairs:
        console.print(_measured(summarize(job.pairs)))
        console.print(Text(HOW_MEASURED, style="dim"))


def printable(text: str, console: Console) -> str:
    """Return a text with control characters, and characters that cannot be shown, escaped as in Python strings."""
    escaped = "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)
    return escaped.encode(console.encoding, "backslashreplace").decode(console.encoding)


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


def _print_sections(sections: Sequence[Section], console: Console) -> None:
    """Print all findings, and how many errors and warnings there are."""
    for section in sections:
        console.print(Text(section.title, style="bold"))
        names = max((len(printable(finding.name, console)) for finding in section.findings), default=0)
        for finding in section.findings:
            _print_finding(finding, min(names, _MAX_NAME), console)
        console.print()
    console.print(_summary(sections))
    console.print()


def _print_finding(finding: Finding, names: int, console: Console) -> None:
    """Print verdict, name and value on one line, if they fit, and what else there is below, at almost full width."""
    verdict = Text(f"{_INDENT}{finding.verdict.value:<8}", _STYLES[finding.verdict])
    name, value = (Text(printable(text, console), "default") for text in (finding.name, finding.value))
    below = [Text(printable(finding.reason, console), "dim"), Text(printable(finding.note, console), _COMMAND)]
    line = Text.assemble(verdict, name, " " * max(0, names - name.cell_len), _INDENT, value)
    if line.cell_len > console.width:
        line, below = Text.assemble(verdict, name), [value, *below]
    console.print(line)
    for text in filter(None, below):
        console.print(Padding(text, (0, 0, 0, len(_BELOW)), expand=False))
    if finding.command:
        # A folded command could not be copied.
        console.print(Text(COMMAND_INDENT + printable(finding.command, console), _COMMAND), soft_wrap=True)


def _summary(sections: Sequence[Section]) -> Text:
    verdicts = [finding.verdict for section in sections for finding in section.findings]
    errors, warnings = verdicts.count(Verdict.ERROR), verdicts.count(Verdict.WARNING)
    style = _STYLES[Verdict.ERROR if errors else Verdict.WARNING if warnings else Verdict.GOOD]
    return Text(f"{count(errors, 'error')}, {count(warnings, 'warning')}", style=style)
