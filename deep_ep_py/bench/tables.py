"""A report as a table for people."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from deep_ep_py.bench.results import BASELINE_OP


def print_report(report: dict[str, Any], console: Console) -> None:
    """Print one table per size, and whether the results were right.

    Parameters
    ----------
    report
        What `results.report` returned.
    console
        Where to print.
    """
    config = report["config"]
    console.print(
        f"{config['ranks']} ranks on {_where(config)}, hidden {config['hidden']} {config['dtype']}, "
        f"top-{config['topk']} of {config['experts']} experts, {config['routing']} routing, seed {config['seed']}; "
        f"median (min .. max) of {config['iterations']} iterations, slowest rank"
    )
    for size in report["sizes"]:
        console.print(_size_table(size))
        if size["host_us"]:
            console.print(_host_line(size["host_us"]))
    for name, what in config["notes"]["ops"].items():
        console.print(f"[bold]{name}[/]: {what}", style="dim")
    _print_checks(report, console)


def _where(config: dict[str, Any]) -> str:
    machine = config["machine"]
    if config["device"] == "cuda":
        if config["gpus"] > 1:
            return _gpus(config)
        return f"one GPU ({machine['gpu']})" + (", which they share as threads" if config["ranks"] > 1 else "")
    nodes = f", as {config['nodes']} nodes with {_between(config)} between them" if config["nodes"] > 1 else ""
    return f"{machine['cores']} cores{nodes}"


def _gpus(config: dict[str, Any]) -> str:
    """Ranks with a GPU each: where these are, and what joins them."""
    used = config["transport"]
    linked = "linked " if config["nodes"] == 1 else ""
    where = f" of {used['machines']} machines" if used["machines"] > 1 else ""
    text = f"{config['gpus']} {linked}GPUs{where}, a process and a GPU each ({config['machine']['gpu']})"
    if config["nodes"] > 1:
        nodes = f"{config['nodes']} nodes" + (" on one machine" if used["machines"] == 1 else "")
        text += f", as {nodes} with {_joins(used)} between them"
    return text + (", heaps in NVSHMEM's" if used["heap"] == "nvshmem" else "")


def _joins(used: dict[str, Any]) -> str:
    """What joins nodes of GPUs, in words."""
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


def _size_table(size: dict[str, Any]) -> Table:
    title = f"{size['tokens']} tokens per rank, {size['rows']} rows in all"
    caption = "GB/s: logical bytes, all ranks together"
    if size["baselines"]:
        caption += "; ×: baseline time over ours, above 1 ours is faster"
    table = Table(title=title, caption=caption, title_justify="left", caption_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("operation")
    table.add_column("ms", justify="right")
    table.add_column("min .. max", justify="right")
    table.add_column("GB/s", justify="right")
    if "copy_gb_per_s" in size:
        caption += f"; of copy: bytes moved per second over a large copy's, {size['copy_gb_per_s']:.0f} GB/s on a GPU"
        table.caption = caption
        table.add_column("of copy", justify="right")
    crossing = any("crossing_bytes" in result for result in size["ops"].values())
    if crossing:
        caption += "; crossing: what a rank sends to other nodes, the mean over the ranks"
        table.caption = caption
        for column in ("crossing MB", "crossing GB/s"):
            table.add_column(column, justify="right")
    on_the_wire = any("messages" in result for result in size["ops"].values())
    if on_the_wire:
        caption += "; wire: what all ranks send over the network in an operation"
        table.caption = caption
        for column in ("wire MB", "wire GB/s", "messages"):
            table.add_column(column, justify="right")
    for name in size["baselines"]:
        table.add_column(f"{name} ms (×)", justify="right")
    for op, result in size["ops"].items():
        times = result["ms"]
        row = [op, f"{times['median']:.3g}", f"{times['min']:.3g} .. {times['max']:.3g}"]
        row.append(f"{result['logical_gb_per_s']:.1f}")
        if "copy_gb_per_s" in size:
            row.append(f"{result['of_copy']:.2f}" if "of_copy" in result else "")
        if crossing:
            row += _crossing_cells(result)
        if on_the_wire:
            row += _wire_cells(result)
        row += [_baseline_cell(size, op, name, baseline) for name, baseline in size["baselines"].items()]
        table.add_row(*row)
    return table


def _host_line(host: dict[str, dict[str, float]]) -> str:
    times = (f"{op} {times['median']:.0f} µs ({times['min']:.0f} .. {times['max']:.0f})" for op, times in host.items())
    return f"  host time per eager call, up to its launch: {', '.join(times)}"


def _crossing_cells(result: dict[str, Any]) -> list[str]:
    if "crossing_bytes" not in result:
        return ["", ""]
    return [f"{result['crossing_bytes'] / 1e6:.3g}", f"{result['crossing_gb_per_s']:.2f}"]


def _wire_cells(result: dict[str, Any]) -> list[str]:
    if "messages" not in result:
        return ["", "", ""]
    return [f"{result['wire_bytes'] / 1e6:.3g}", f"{result['wire_gb_per_s']:.2f}", str(result["messages"])]


def _baseline_cell(size: dict[str, Any], op: str, name: str, baseline: dict[str, Any]) -> str:
    if op not in BASELINE_OP:
        return ""
    ratio = size["ratios"][op][name]
    color = "green" if ratio >= 1 else "yellow"
    return f"{baseline[BASELINE_OP[op]]['ms']:.2f} ([bold {color}]{ratio:.2f}[/])"


def _print_checks(report: dict[str, Any], console: Console) -> None:
    for size in report["sizes"]:
        for name, errors in size["checks"].items():
            for error in errors:
                console.print(f"[red]{size['tokens']} tokens, {name}: {error}[/]")
    if report["verified"]:
        console.print("[green]verified[/]: all elements of the last timed iteration match the oracle")
    else:
        console.print("[red]NOT verified[/]: the results above are wrong")
