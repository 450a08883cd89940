"""A report as a plot: time and GB/s over size, for ours and the baselines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from deep_ep_py.base.pictures import get_pyplot
from deep_ep_py.tools.bench.results import BASELINE_OP
from deep_ep_py.tools.bench.tables import cores_text
from deep_ep_py.tools.bench.timing import three_digits

OURS, OURS_COLOR = "deep_ep_py", "#0b6e4f"
_COLORS = {
    OURS: OURS_COLOR,
    "memcpy": "#7a7a7a",
    "gloo_bare": "#d98e04",
    "gloo": "#b3423a",
    "normal": "#2b6cb0",
    "barrier": "#8e44ad",
    "V1": "#2b6cb0",
    "V1, permuted": "#63a4ff",
    "V2": OURS_COLOR,
    "V2, no host wait": "#5fb49c",
    "V2, expanded": "#c2185b",
    "V2, expanded, no host wait": "#f48fb1",
}
_PANELS = {op: {OURS: op} for op in ("dispatch", "combine", "pair")}
_ELASTIC_PANELS = {
    "dispatch": {
        "V1": "dispatch",
        "V1, permuted": "dispatch_permuted",
        "V2": "dispatch_v2",
        "V2, no host wait": "dispatch_no_wait",
        "V2, expanded": "dispatch_expanded",
        "V2, expanded, no host wait": "expanded_no_wait",
    },
    "combine": {"V1": "combine", "V2": "combine_v2", "V2, expanded": "combine_expanded"},
}
"""By title: the operations that a panel shows, by the names of their lines."""
_LEGEND_COLUMNS = 6
_NOTE_COLOR = "#666666"
_CUT = 1.5  # an axis ends at so many times the largest median: one slow iteration must not flatten the others
_LOGARITHMIC_FROM = 10.0  # lines over sizes whose largest median is so many times the smallest have a logarithmic axis


def plot_report(report: dict[str, Any], path: Path) -> None:
    """Write a PNG: one column per operation, with time above and logical GB/s below.

    Every timed iteration is a dot. Where several sizes were measured, a line joins the medians.

    Parameters
    ----------
    report
        The result of `results.report`.
    path
        The file to write; its folder is created.
    """
    pyplot = get_pyplot()
    every = _ELASTIC_PANELS if report["config"]["mode"] == "elastic" else _PANELS
    panels = {title: ops for title, ops in every.items() if set(ops.values()) <= set(report["ops"])}
    width = 13 if len(panels) > 1 else 6
    figure, axes = pyplot.subplots(2, len(panels), figsize=(width, 7.5), squeeze=False, layout="constrained")
    several = len(report["sizes"]) > 1
    for column, (title, ops) in enumerate(panels.items()):
        for axis, as_rate in ((axes[0][column], False), (axes[1][column], True)):
            series = _series(report, ops, as_rate)
            (_draw_lines if several else _draw_columns)(axis, series)
            if several and not as_rate and _spread(series) > _LOGARITHMIC_FROM:
                _scale_by_decades(axis)
                axis.set_title("logarithmic", loc="right", fontsize=8, color=_NOTE_COLOR)
            else:
                begin_at_zero(axis, series)
            axis.spines[["top", "right"]].set_visible(False)
            axis.grid(True, axis="y", alpha=0.2)
        axes[0][column].set_title(title)
    axes[0][0].set_ylabel("ms")
    axes[1][0].set_ylabel("logical GB/s, all ranks together")
    if several:
        handles, labels = axes[0][0].get_legend_handles_labels()
        columns = min(len(labels), _LEGEND_COLUMNS)
        figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False)
        for axis in axes[1]:
            axis.set_xlabel("tokens per rank")
    figure.suptitle(_title(report), fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _title(report: dict[str, Any]) -> str:
    config = report["config"]
    machine = config["machine"]
    where = machine.get("gpu") or machine["cpu"]
    tokens = f", {config['tokens']} tokens per rank" if len(report["sizes"]) == 1 else ""
    nodes = f" on {config['nodes']} nodes" if config["nodes"] > 1 else ""
    return (
        f"{config['mode']} mode, {config['ranks']} ranks{nodes}, hidden {config['hidden']} {config['dtype']}, "
        f"top-{config['topk']} of {config['experts']} experts, {config['routing']} routing{tokens}\n"
        f"{where}, {cores_text(machine['cores'])}, {machine['memory_gib']} GiB; deep_ep_py {machine['deep_ep_py']}"
        f"{', commit ' + machine['commit'] if machine['commit'] else ''}\n"
        f"slowest rank; a dot per iteration, {'a bar at the median' if tokens else 'lines join medians'}"
    )


Series = dict[str, list[tuple[int, float, list[float]]]]
"""By name, for each size: its tokens per rank, the median, and the value of each iteration."""


def _series(report: dict[str, Any], ops: dict[str, str], as_rate: bool) -> Series:
    series: Series = {}
    for size in sorted(report["sizes"], key=lambda size: size["tokens"]):
        ours = {name: size["ops"][op] for name, op in ops.items()}
        measured = {name: (op["ms"]["median"], op["samples_ms"]) for name, op in ours.items()}
        first = next(iter(ops.values()))
        for name, baseline in size["baselines"].items():
            of = baseline[BASELINE_OP[first]]
            measured[name] = (of["ms"], of["samples_ms"])
        for name, (median, samples) in measured.items():
            moved = size["ops"][first]["bytes"]
            values = [moved / value / 1e6 if as_rate else value for value in (median, *samples)]
            series.setdefault(name, []).append((size["tokens"], values[0], values[1:]))
    return series


def _spread(series: Series) -> float:
    """Return the largest median over the smallest."""
    medians = [median for points in series.values() for _, median, _ in points]
    return max(medians) / min(medians)


def begin_at_zero(axis: Any, series: Series) -> None:
    """Let the vertical axis begin at 0 and end where it is cut, with a note on what is beyond."""
    points = [point for one in series.values() for point in one]
    samples = [value for _, _, values in points for value in values]
    end = min(max(samples), _CUT * max(median for _, median, _ in points))
    axis.set_ylim(0, 1.08 * end)
    axis.locator_params(axis="y", nbins=6)
    axis.yaxis.set_major_formatter("{x:g}")
    beyond = [value for value in samples if value > 1.08 * end]
    if beyond:
        note = f"\N{UPWARDS ARROW} {len(beyond)} of {len(samples)} iterations beyond, up to {three_digits(max(beyond))}"
        axis.text(0.99, 0.99, note, transform=axis.transAxes, ha="right", va="top", fontsize=8, color=_NOTE_COLOR)


def _scale_by_decades(axis: Any) -> None:
    """Make the vertical axis logarithmic, with labels at 1, 2 and 5: it may span less than a decade."""
    from matplotlib.ticker import LogLocator

    axis.set_yscale("log")
    axis.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_formatter("{x:g}")


def _draw_lines(axis: Any, series: Series) -> None:
    for name, points in series.items():
        tokens, medians, samples = zip(*points, strict=True)
        color = _COLORS[name]
        axis.plot(tokens, medians, color=color, label=name, linewidth=2.5 if name == OURS else 1.5)
        spread = [(size, value) for size, values in zip(tokens, samples, strict=True) for value in values]
        axis.scatter(*zip(*spread, strict=True), s=9, color=color, alpha=0.35, linewidths=0)
    axis.set_xscale("log", base=2)
    sizes = sorted({size for points in series.values() for size, _, _ in points})
    axis.set_xticks(sizes, [str(size) for size in sizes])
    axis.minorticks_off()


def _draw_columns(axis: Any, series: Series) -> None:
    for place, (name, ((_, median, samples),)) in enumerate(series.items()):
        count = len(samples)
        across = [place - 0.2 + 0.4 * (index + 0.5) / count for index in range(count)]
        axis.hlines(median, place - 0.3, place + 0.3, color=_COLORS[name], linewidth=2.5)
        axis.scatter(across, samples, s=14, color=_COLORS[name], alpha=0.45, linewidths=0, zorder=3)
        axis.annotate(three_digits(median), (place + 0.32, median), va="center", fontsize=9)
    # A line for each part of a name: long names would run into each other.
    axis.set_xticks(range(len(series)), [name.replace(", ", ",\n") for name in series], fontsize=8)
    axis.set_xlim(-0.6, len(series) - 0.1)
