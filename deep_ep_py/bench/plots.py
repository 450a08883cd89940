"""A report as a picture: time and GB/s over size, ours and the baselines."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from deep_ep_py.bench.results import BASELINE_OP

INSTALL_HINT = "a plot needs matplotlib: pip install matplotlib"
OURS = "deep_ep_py"
_COLORS = {
    OURS: "#0b6e4f",
    "memcpy": "#7a7a7a",
    "gloo_bare": "#d98e04",
    "gloo": "#b3423a",
    "normal": "#2b6cb0",
    "barrier": "#8e44ad",
}
_PANELS = ("dispatch", "combine", "pair")


def can_plot() -> bool:
    """Say whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def get_pyplot() -> Any:
    """Return matplotlib's pyplot, drawing into files."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def plot_report(report: dict[str, Any], path: Path) -> None:
    """Write a PNG: a column for each operation, time above and logical GB/s below.

    Parameters
    ----------
    report
        What `results.report` returned.
    path
        The file to write; its folder is made.
    """
    pyplot = get_pyplot()
    panels = [op for op in _PANELS if op in report["ops"]]
    width = 13 if len(panels) > 1 else 6
    figure, axes = pyplot.subplots(2, len(panels), figsize=(width, 7), squeeze=False, layout="constrained")
    draw = _draw_bars if len(report["sizes"]) == 1 else _draw_lines
    for column, op in enumerate(panels):
        draw(axes[0][column], _curves(report, op, "ms"))
        draw(axes[1][column], _curves(report, op, "gb_per_s"))
        axes[1][column].set_ylim(bottom=0)
        axes[0][column].set_title(op)
    axes[0][0].set_ylabel("ms")
    axes[1][0].set_ylabel("logical GB/s, all ranks together")
    if len(report["sizes"]) > 1:
        for axis in axes[0]:
            axis.set_yscale("log")
            axis.yaxis.set_major_formatter("{x:g}")
            axis.yaxis.set_minor_formatter("")
        handles, labels = axes[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
        for axis in axes[1]:
            axis.set_xlabel("tokens per rank")
    config = report["config"]
    figure.suptitle(
        f"{config['ranks']} ranks on {config['machine']['cores']} cores ({config['machine']['cpu']}), "
        f"hidden {config['hidden']} {config['dtype']}, top-{config['topk']} of {config['experts']}, "
        f"{config['routing']} routing"
        + (f", {config['tokens']} tokens per rank" if len(report["sizes"]) == 1 else "")
        + "\nmedian, slowest rank",
        fontsize=11,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _curves(report: dict[str, Any], op: str, quantity: str) -> dict[str, list[tuple[int, float]]]:
    """Return for each contestant the (tokens, value) points of one operation."""
    curves: dict[str, list[tuple[int, float]]] = {}
    for size in report["sizes"]:
        milliseconds = {OURS: size["ops"][op]["ms"]["median"]}
        milliseconds |= {name: baseline[BASELINE_OP[op]]["ms"] for name, baseline in size["baselines"].items()}
        for name, value in milliseconds.items():
            rate = size["ops"][op]["bytes"] / value / 1e6
            curves.setdefault(name, []).append((size["tokens"], value if quantity == "ms" else rate))
    return curves


def _draw_lines(axis: Any, curves: dict[str, list[tuple[int, float]]]) -> None:
    for name, points in curves.items():
        tokens, values = zip(*sorted(points), strict=True)
        axis.plot(tokens, values, marker="o", color=_COLORS[name], label=name, linewidth=2.5 if name == OURS else 1.5)
    axis.set_xscale("log", base=2)
    sizes = sorted({tokens for points in curves.values() for tokens, _ in points})
    axis.set_xticks(sizes, [str(size) for size in sizes])
    axis.grid(True, which="both", alpha=0.2)


def _draw_bars(axis: Any, curves: dict[str, list[tuple[int, float]]]) -> None:
    values = [points[0][1] for points in curves.values()]
    bars = axis.bar(list(curves), values, color=[_COLORS[name] for name in curves])
    axis.bar_label(bars, fmt="%.3g")
    axis.margins(y=0.12)
    axis.spines[["top", "right"]].set_visible(False)
