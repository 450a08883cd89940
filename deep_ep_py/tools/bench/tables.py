"""A report as a table for people."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from deep_ep_py.tools.bench.results import BASELINE_OP
from deep_ep_py.tools.bench.timing import three_digits

_BASELINES_BESIDE = 2  # more of them do not fit beside the times in 80 columns

Cell = Callable[..., str]
"""Returns a cell from an operation and what was measured of it."""
Columns = dict[str, Cell]


def print_report(report: dict[str, Any], console: Console) -> None:
    """Print one table per size, and what its operations are.

    Parameters
    ----------
    report
        The result of `results.report`.
    console
        The console to print to.
    """
    config = report["config"]
    console.print(
        f"{config['ranks']} ranks on {_where(config)}, hidden {config['hidden']} {config['dtype']}, "
        f"top-{config['topk']} of {config['experts']} experts, {config['routing']} routing, seed {config['seed']}; "
        f"median (min .. max) of {config['iterations']} iterations, slowest rank"
    )
    for size in report["sizes"]:
        for table in _size_tables(size):
            console.print(table)
        if size["host_us"]:
            console.print(_host_line(size["host_us"]))
    notes = Table.grid(padding=(0, 2))
    for name, what in config["notes"]["ops"].items():
        notes.add_row(f"[bold]{name}[/]", what)
    console.print()
    console.print(notes, style="dim")


def print_verdict(report: dict[str, Any], console: Console) -> None:
    """Print whether the results were right.

    Parameters
    ----------
    report
        The result of `results.report`.
    console
        The console to print to.
    """
    for size in report["sizes"]:
        for name, errors in size["checks"].items():
            for error in errors:
                console.print(f"[red]{size['tokens']} tokens, {name}: {error}[/]")
    if report["verified"]:
        console.print("[green]verified[/]: the results are right, every element as plain torch computes it")
    else:
        console.print("[red]NOT verified[/]: the results are wrong, as listed above")


def cores_text(cores: int) -> str:
    """Return a number of cores in words."""
    return f"{cores} core{'' if cores == 1 else 's'}"


def _where(config: dict[str, Any]) -> str:
    machine = config["machine"]
    if config["device"] == "cuda":
        if config["gpus"] > 1:
            return _gpus(config)
        return f"one GPU ({machine['gpu']})" + (", which they share as threads" if config["ranks"] > 1 else "")
    nodes = f", as {config['nodes']} nodes with {_between(config)} between them" if config["nodes"] > 1 else ""
    return f"{cores_text(machine['cores'])}{nodes}"


def _gpus(config: dict[str, Any]) -> str:
    """Describe ranks with a GPU each: where they are, and what joins them."""
    used = config["transport"]
    linked = "linked " if config["nodes"] == 1 else ""
    where = f" of {used['machines']} machines" if used["machines"] > 1 else ""
    text = f"{config['gpus']} {linked}GPUs{where}, a process and a GPU each ({config['machine']['gpu']})"
    if config["nodes"] > 1:
        nodes = f"{config['nodes']} nodes" + (" on one machine" if used["machines"] == 1 else "")
        text += f", as {nodes} with {_joins(used)} between them"
    return text + (", heaps in NVSHMEM's" if used["heap"] == "nvshmem" else "")


def _joins(used: dict[str, Any]) -> str:
    """Describe what joins nodes of GPUs."""
    names = {
        "ibgda": "NVSHMEM's queue pairs" if used["heap"] == "nvshmem" else "software NICs",
        "proxy": f"the proxy (libfabric's {used['provider'] or 'best provider'})",
    }
    joins = " and ".join(names[path] for path in used["paths"] if path in names)
    return joins + (" through host memory" if used["through_host"] else "")


def _between(config: dict[str, Any]) -> str:
    if config.get("fabric") != "proxy":
        return "software NICs"
    return f"the proxy (libfabric's {config['provider'] or 'best provider'})"


def _size_tables(size: dict[str, Any]) -> Iterator[Table]:
    """Yield tables that fit 80 columns: times beside a few baselines, then what crosses the network."""
    network, baselines = _network_columns(size), _baseline_columns(size)
    times = _times_columns(size)
    title = f"{size['tokens']} tokens per rank, {size['rows']} rows in all"
    caption = ["GB/s: logical bytes, all ranks together"]
    if "copy_gb_per_s" in size:
        copied = f"{size['copy_gb_per_s']:.0f} GB/s on a GPU"
        caption.append(f"of copy: bytes moved per second over a large copy's, {copied}")
    compared = ["×: baseline time over ours, above 1 ours is faster"]
    if len(baselines) <= _BASELINES_BESIDE:
        yield _table(size, times | baselines, title, caption + (compared if baselines else []))
    else:
        yield _table(size, times, title, caption)
        yield _table(size, baselines, "", compared)
    if any("kernels" in result for result in size["ops"].values()):
        yield _kernels_table(size)
    if network:
        sent = ["wire: what all ranks send over the network in an operation"]
        crossing = ["crossing: what a rank sends to other nodes, the mean over the ranks"]
        yield _table(size, network, "", (crossing if "crossing MB" in network else []) + sent)


def _kernels_table(size: dict[str, Any]) -> Table:
    caption = "a kernel alone, with its waits for other ranks; over copy: over a large copy's time for the call's bytes"
    style = {"caption_justify": "left", "box": box.SIMPLE_HEAD}
    table = Table(caption=caption, **style)  # type: ignore[arg-type]
    for name in ("kernel", "in"):
        table.add_column(name, no_wrap=True)
    for name in ("ms", "fastest rank", "over copy"):
        table.add_column(name, justify="right")
    for op, result in size["ops"].items():
        for kernel, times in result.get("kernels", {}).items():
            figures = (times["ms"]["median"], times["fastest_rank_ms"], times["over_copy"])
            table.add_row(kernel, op, *map(three_digits, figures))
    return table


def _table(size: dict[str, Any], columns: Columns, title: str, caption: list[str]) -> Table:
    style = {"title_justify": "left", "caption_justify": "left", "box": box.SIMPLE_HEAD}
    table = Table(title=title or None, caption="; ".join(caption), **style)  # type: ignore[arg-type]
    table.add_column("operation", no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right")
    for op, result in size["ops"].items():
        table.add_row(op, *(cell(op, result) for cell in columns.values()))
    return table


def _times_columns(size: dict[str, Any]) -> Columns:
    columns: Columns = {
        "ms": lambda op, result: three_digits(result["ms"]["median"]),
        "min .. max": lambda op, result: " .. ".join(three_digits(result["ms"][of]) for of in ("min", "max")),
        "GB/s": lambda op, result: f"{result['logical_gb_per_s']:.1f}",
    }
    if "copy_gb_per_s" in size:
        columns["of copy"] = lambda op, result: f"{result['of_copy']:.2f}" if "of_copy" in result else ""
    return columns


def _baseline_columns(size: dict[str, Any]) -> Columns:
    return {
        f"{name}\nms (×)": lambda op, result, name=name, baseline=baseline: _baseline_cell(size, op, name, baseline)
        for name, baseline in size["baselines"].items()
    }


def _network_columns(size: dict[str, Any]) -> Columns:
    def value(key: str, scale: float, digits: str) -> Cell:
        return lambda op, result: format(result[key] / scale, digits) if key in result else ""

    columns: Columns = {}
    if any("crossing_bytes" in result for result in size["ops"].values()):
        columns["crossing MB"] = value("crossing_bytes", 1e6, ".3g")
        columns["crossing GB/s"] = value("crossing_gb_per_s", 1, ".2f")
    if any("messages" in result for result in size["ops"].values()):
        columns["wire MB"] = value("wire_bytes", 1e6, ".3g")
        columns["wire GB/s"] = value("wire_gb_per_s", 1, ".2f")
        columns["messages"] = value("messages", 1, ".0f")
    return columns


def _host_line(host: dict[str, dict[str, float]]) -> str:
    times = (f"{op} {times['median']:.0f} µs ({times['min']:.0f} .. {times['max']:.0f})" for op, times in host.items())
    return f"  host time per eager call, up to its launch: {', '.join(times)}"


def _baseline_cell(size: dict[str, Any], op: str, name: str, baseline: dict[str, Any]) -> str:
    if op not in BASELINE_OP:
        return ""
    ratio = size["ratios"][op][name]
    color = "green" if ratio >= 1 else "yellow"
    return f"{baseline[BASELINE_OP[op]]['ms']:.2f} ([bold {color}]{ratio:.2f}[/])"
