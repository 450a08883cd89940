"""The demo's report: tables and a picture."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from deep_ep_py.examples.demo_check import BOUND
from deep_ep_py.examples.demo_config import DemoConfig
from deep_ep_py.examples.picture import pyplot_for, save_picture
from deep_ep_py.tools.bench.timing import summary

_COLORS = {"gate": "#9aa5b1", "layout": "#4c9f70", "dispatch": "#0b6e4f", "experts": "#9aa5b1", "combine": "#0b6e4f"}


def print_demo(figures: dict[str, Any], config: DemoConfig, console: Console) -> None:
    """Print the times, the amount of data moved, and the check.

    Parameters
    ----------
    figures
        The figures that rank 0 returned.
    config
        The configuration of the demo.
    console
        The console to print to.
    """
    _print_times(figures, config, console)
    _print_movement(figures, config, console)
    check = figures["check"]
    console.print(
        f"against the same layer in one process: max abs error {check.max_abs_error:.3g}, relative to the largest "
        f"element {check.max_rel_error:.3g}, calc_diff {check.calc_diff:.3g}"
    )
    verdict = "[green]passed[/]" if check.passed else "[red]FAILED[/]"
    console.print(f"{verdict}: the largest error is {check.of_bound:.2f} of its bound")
    console.print(f"  {BOUND}", style="dim")


def _print_times(figures: dict[str, Any], config: DemoConfig, console: Console) -> None:
    title = f"one MoE layer, slowest of {config.ranks} ranks, {config.steps} runs"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for name in ("phase", "median ms", "min", "max"):
        table.add_column(name, justify="left" if name == "phase" else "right")
    for name, milliseconds in figures["phases"].items():
        times = summary(milliseconds)
        table.add_row(name, *(f"{times[key]:.2f}" for key in ("median", "min", "max")))
    console.print(table)


def _print_movement(figures: dict[str, Any], config: DemoConfig, console: Console) -> None:
    rows, tokens = sum(figures["rows"]), config.ranks * config.tokens
    megabytes = rows * config.hidden * 2 / 1e6
    console.print(
        f"{tokens} tokens of hidden {config.hidden}, top-{config.topk} of {config.experts} experts: {rows} rows moved "
        f"({rows / tokens:.2f} per token, {megabytes:.0f} MB each way); busiest over mean: "
        f"rank {_imbalance(figures['rows']):.2f}, expert {_imbalance(figures['tokens_per_expert']):.2f}"
    )


def _imbalance(loads: list[int]) -> float:
    return max(loads) / statistics.mean(loads)


def plot_demo(figures: dict[str, Any], config: DemoConfig, path: Path, console: Console) -> None:
    """Plot the times of the phases and the load of ranks and experts.

    Parameters
    ----------
    figures
        The figures that rank 0 returned.
    config
        The configuration of the demo.
    path
        The PNG file to write; its folder is created.
    console
        Gets a line with the path of the picture, or the reason why there is none.
    """
    pyplot = pyplot_for(console)
    if pyplot is None:
        return
    figure, (times, ranks, experts) = pyplot.subplots(1, 3, figsize=(14, 4.5), layout="constrained")
    _draw_times(times, figures["phases"])
    ranks.bar(range(config.ranks), figures["rows"], color="#0b6e4f")
    ranks.set(title="rows received", xlabel="rank", xticks=range(config.ranks))
    experts.bar(range(config.experts), sorted(figures["tokens_per_expert"], reverse=True), width=1.0, color="#d98e04")
    experts.set(title="tokens per expert", xlabel="experts, busiest first")
    for axis in (times, ranks, experts):
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(
        f"a MoE layer on {config.ranks} ranks: {config.tokens} tokens each, hidden {config.hidden}, "
        f"top-{config.topk} of {config.experts} experts"
    )
    save_picture(figure, path, console)
    pyplot.close(figure)


def _draw_times(axis: Any, phases: dict[str, list[float]]) -> None:
    for place, (name, milliseconds) in enumerate(phases.items()):
        median, count = summary(milliseconds)["median"], len(milliseconds)
        across = [place - 0.2 + 0.4 * (run + 0.5) / count for run in range(count)]
        axis.hlines(median, place - 0.3, place + 0.3, color=_COLORS[name], linewidth=2.5)
        axis.scatter(across, milliseconds, s=14, color=_COLORS[name], alpha=0.45, linewidths=0, zorder=3)
        axis.annotate(f"{median:.2f}", (place + 0.32, median), va="center", fontsize=9)
    axis.set_xticks(range(len(phases)), list(phases))
    axis.set_xlim(-0.6, len(phases) - 0.1)
    axis.set_yscale("log")
    axis.margins(y=0.1)
    axis.set_ylabel("ms, logarithmic")
    axis.set_title("time of each phase on the slowest rank:\na dot per run, a bar at the median")
