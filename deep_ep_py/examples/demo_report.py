"""The demo's report: tables, a picture and a verdict."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from deep_ep_py.examples.demo_check import Check
from deep_ep_py.examples.demo_config import DemoConfig
from deep_ep_py.examples.picture import pyplot_for, save_picture
from deep_ep_py.tools.bench.timing import summary, three_digits

_OURS, _MODEL = "#0b6e4f", "#9aa5b1"
_OF_MODEL = ("gate", "experts")  # what the library has no part in


def print_demo(figures: dict[str, Any], config: DemoConfig, console: Console) -> None:
    """Print the times and the amount of data moved.

    Parameters
    ----------
    figures
        The figures that rank 0 returned.
    config
        The configuration of the demo.
    console
        The console to print to.
    """
    title = f"milliseconds of each phase, slowest rank, {config.steps} runs"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for name in ("phase", "median", "min", "max", "of the layer"):
        table.add_column(name, justify="left" if name == "phase" else "right")
    for name, (times, share) in _times(figures).items():
        table.add_row(name, *(three_digits(times[key]) for key in ("median", "min", "max")), f"{share:.1%}")
    console.print(table)
    rows, tokens = sum(sent for sent, _ in figures["rows"]), config.ranks * config.tokens
    console.print(
        f"dispatch sent each token once to every rank with one of its experts: {tokens} tokens as {rows} rows, "
        f"{_megabytes(rows, config):.0f} MB. combine returned as much."
    )


def print_verdict(check: Check, config: DemoConfig, console: Console) -> None:
    """Print whether the result is correct, and what it was compared with.

    Parameters
    ----------
    check
        The comparison.
    config
        The configuration of the demo.
    console
        The console to print to.
    """
    elements = config.ranks * config.tokens * config.hidden
    compared = f"that of the same layer in one process, in all {elements} elements, to BF16's rounding"
    verdict = f"[green]correct[/]: the output on {config.ranks} ranks equals {compared}"
    if not check.passed:
        verdict = f"[red]WRONG[/]: the output on {config.ranks} ranks does not equal {compared}"
    console.print(
        f"{verdict}. The largest error is {check.of_bound:.2f} of its bound; calc_diff {check.calc_diff:.1e}."
    )


def _times(figures: dict[str, Any]) -> dict[str, tuple[dict[str, float], float]]:
    """Return the times of each phase, and its share of the sum of all medians."""
    times = {name: summary(milliseconds) for name, milliseconds in figures["phases"].items()}
    together = sum(one["median"] for one in times.values())
    return {name: (one, one["median"] / together) for name, one in times.items()}


def _megabytes(rows: int, config: DemoConfig) -> float:
    return rows * config.row_bytes / 1e6


def plot_demo(figures: dict[str, Any], config: DemoConfig, path: Path, console: Console) -> None:
    """Plot where the layer's time goes, and what each rank sent and received.

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
    figure, (times, moved) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    _draw_times(times, figures)
    _draw_moved(moved, figures["rows"], config)
    for axis in (times, moved):
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"A MoE layer on {config.ranks} ranks: {config.sizes}", fontsize=11)
    save_picture(figure, path, console)
    pyplot.close(figure)


def _draw_times(axis: Any, figures: dict[str, Any]) -> None:
    phases = _times(figures)
    for place, (name, (times, share)) in enumerate(phases.items()):
        axis.barh(place, times["median"], color=_MODEL if name in _OF_MODEL else _OURS)
        axis.annotate(
            f"{three_digits(times['median'])} ms, {share:.1%}",
            (times["median"], place),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
        )
    axis.set_yticks(range(len(phases)), list(phases))
    axis.invert_yaxis()
    axis.set_xlim(0, 1.35 * max(times["median"] for times, _ in phases.values()))  # room for what is beside the bars
    axis.set_xlabel("ms on the slowest rank, median")
    axis.set_title("where the time goes\n(green: this library, gray: the model)")


def _draw_moved(axis: Any, rows: list[list[int]], config: DemoConfig) -> None:
    for shift, color, name, counts in zip((-0.2, 0.2), (_OURS, "#d98e04"), ("sent", "received"), zip(*rows)):
        places = [rank + shift for rank in range(config.ranks)]
        axis.bar(places, [_megabytes(count, config) for count in counts], 0.38, color=color, label=name)
    axis.set(xlabel="rank", ylabel="MB", xticks=range(config.ranks))
    axis.set_title("what dispatch moved\n(combine moves the same back)")
    axis.margins(y=0.15)  # room for the legend
    axis.legend(loc="upper right", ncols=2, frameon=False)
