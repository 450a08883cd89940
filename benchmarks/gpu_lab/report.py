"""The report of what is known so far: JSON for programs, Markdown for people, a table for the console."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from benchmarks.gpu_lab.against import summary_of_pairs
from benchmarks.gpu_lab.machine import Machine

Result = dict[str, Any]
Rows = list[list[str]]
_COLORS = {"passed": "green", "skipped": "yellow"}


def write(machine: Machine, results: list[Result], chosen: list[str], folder: Path) -> None:
    """Write report.json and report.md.

    Parameters
    ----------
    machine
        The machine.
    results
        All results so far, in the order of worth.
    chosen
        Names of the experiments that this run is about.
    folder
        Where the reports go.
    """
    pairs = summary_of_pairs(results)
    whole = {
        "machine": asdict(machine),
        "results": {result["name"]: result for result in results},
        "not_run": [name for name in chosen if name not in {result["name"] for result in results}],
        **({"against": pairs} if pairs else {}),
    }
    (folder / "report.json").write_text(json.dumps(whole, indent=2) + "\n")
    (folder / "report.md").write_text("\n".join(_markdown(machine, results, whole["not_run"], pairs)) + "\n")


def as_table(results: list[Result]) -> Table:
    """Return all results as a table for the console."""
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("experiment")
    table.add_column("result")
    table.add_column("seconds", justify="right")
    table.add_column("note", overflow="fold")
    for result in results:
        color = _COLORS.get(result["result"], "red")
        seconds = f"{result['seconds']:.0f} of {result['limit']}"
        table.add_row(result["name"], f"[{color}]{result['result']}[/]", seconds, result["note"])
    return table


def _markdown(machine: Machine, results: list[Result], not_run: list[str], pairs: list[Result]) -> Iterator[str]:
    count = f"{machine.gpus} x " if machine.gpus > 1 else ""
    yield f"# {count}{machine.gpu}, {machine.date}"
    yield ""
    versions = f"Linux {machine.kernel}, Python {machine.python}, torch {machine.torch}"
    yield f"Commit {machine.commit}, driver {machine.driver}, {machine.cores} cores, {versions}."
    yield ""
    rows = [
        [one["name"], one["result"], f"{one['seconds']:.0f} of {one['limit']}", one["question"], one["note"]]
        for one in results
    ]
    rows += [[name, "not run", "", "", ""] for name in not_run]
    yield from _table(["experiment", "result", "seconds", "question", "last line or reason"], rows)
    if pairs:
        yield from ("", "## Beside the other sources", "")
        yield "Time of the other sources over ours, above 1 ours is faster: the median of all pairs, and the range."
        yield ""
        yield from _table(
            ["benchmark", "call", "kernel", "ratio", "range", "pairs"],
            [
                [one["benchmark"], one["call"], one["kernel"], f"{one['ratio']:.3f}"]
                + [f"{one['min']:.3f} to {one['max']:.3f}", str(one["pairs"])]
                for one in pairs
            ],
        )
    for result in results:
        yield from _details(result)


def _details(result: Result) -> Iterator[str]:
    """Yield the figures of an experiment, and the end of its output if it has not passed."""
    figures, tail = result.get("figures"), result.get("tail")
    if not figures and not tail:
        return
    yield from ("", f"## {result['name']}", "", result["question"])
    if figures:
        for heading, columns, rows in _tables(figures):
            yield from ("", heading, "") if heading else ("",)
            yield from _table(columns, rows)
        if note := figures.get("boundary") or figures.get("config", {}).get("timing"):
            yield from ("", note)
        if note := figures.get("config", {}).get("notes", {}).get("kernels"):
            yield from ("", f"Kernels: {note}")
    if tail:
        yield from ("", "```", *tail, "```")


def _tables(figures: dict[str, Any]) -> Iterator[tuple[str, list[str], Rows]]:
    """Yield the tables of an experiment's figures: heading, columns, rows."""
    if "tables" in figures:
        for table in figures["tables"]:
            yield table["title"], table["columns"], [[_text(cell) for cell in row] for row in table["rows"]]
    elif "sizes" in figures and "config" in figures:
        yield from _benchmark(figures)
    elif "points" in figures:
        rows = [
            [str(point["blocks"]), _text(1e6 * point["seconds"]), _text(point["gb_per_s"])]
            for point in figures["points"]
        ]
        yield "", ["blocks", "us", "GB/s"], rows
    else:
        plain = {name: value for name, value in figures.items() if isinstance(value, (str, int, float, list, dict))}
        yield "", ["finding", "value"], [[name, _text(value)] for name, value in plain.items()]


def _benchmark(figures: dict[str, Any]) -> Iterator[tuple[str, list[str], Rows]]:
    """Yield the times of calls and of their kernels, each also as a ratio to a copy in the same run."""
    for size in figures["sizes"]:
        rows: Rows = []
        for call, op in size["ops"].items():
            of_copy = f"{1 / op['of_copy']:.3g}" if op.get("of_copy") else ""
            rows.append([call, "", _text(op["ms"]["median"]), "", of_copy])
            for kernel, times in op.get("kernels", {}).items():
                fastest, over = times["fastest_rank_ms"], times["over_copy"]
                rows.append([call, kernel, _text(times["ms"]["median"]), _text(fastest), _text(over)])
        verified = "verified" if size["verified"] else "NOT verified"
        heading = f"{size['tokens']} tokens per rank, {verified}; a large copy moves {size['copy_gb_per_s']:.0f} GB/s."
        yield heading, ["call", "kernel", "ms", "fastest rank", "over a copy's time"], rows


def _table(columns: list[str], rows: Rows) -> Iterator[str]:
    yield f"| {' | '.join(columns)} |"
    yield "|" + "---|" * len(columns)
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', '/') for cell in row)} |"


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
