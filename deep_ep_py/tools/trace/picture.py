"""A timeline as a picture, for documents and for those who have no browser at hand."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from deep_ep_py.base.pictures import get_pyplot

_COLORS = {
    "operation": "#0b6e4f",
    "kernel": "#2b6cb0",
    "wait": "#d98e04",
    "put": "#8e44ad",
    "signal": "#b3423a",
    "arrival": "#b3423a",
}
_NAMED = ("operation", "kernel", "wait")
_ROW, _HEIGHT = 0.28, 0.8
_MIN_SHARE = 0.02  # of the width, for a slice to carry its name
_PADDING = 2  # points before and after a name


def draw(timeline: dict[str, Any], path: Path, title: str = "") -> None:
    """Draw a merged timeline: a row per host, stream of kernels, thread and queue pair, and arrows from signals to the
    waits that they end.

    Parameters
    ----------
    timeline
        The result of `merge.merge`.
    path
        The file, in a format by its suffix: .png, .svg or .pdf.
    title
        Its title.
    """
    pyplot = get_pyplot()
    entries = timeline["traceEvents"]
    titles = {(e["pid"], e["tid"]): e["args"]["name"] for e in entries if e["name"] == "thread_name"}
    slices = [entry for entry in entries if entry["ph"] == "X" and entry["cat"] in _COLORS]
    tracks = sorted({(entry["pid"], entry["tid"]) for entry in slices})
    # What overlaps on a queue pair is on several tracks, and in one row here.
    labels = list(dict.fromkeys((rank, titles[rank, track]) for rank, track in tracks))
    rows = {track: labels.index((track[0], titles[track])) for track in tracks}
    end = max((entry["ts"] + entry["dur"] for entry in slices), default=0.0) or 1.0  # a virtual clock may stand still
    figure, axis = pyplot.subplots(figsize=(12, 1.2 + _ROW * len(labels)), layout="constrained")
    for entry in slices:
        row = rows[entry["pid"], entry["tid"]]
        width = max(entry["dur"], end / 1500)
        axis.barh(row, width, _HEIGHT, entry["ts"], color=_COLORS[entry["cat"]], edgecolor="white", linewidth=0.3)
    _draw_arrows(axis, entries, rows)
    axis.set_yticks(range(len(labels)), [f"rank {rank}: {title}" for rank, title in labels], fontsize=7)
    axis.set_ylim(len(labels) - 0.5, -0.5)
    axis.set_xlim(0, end)
    axis.set_xlabel("microseconds")
    axis.spines[["top", "right"]].set_visible(False)
    for name in _COLORS:
        if any(entry["cat"] == name for entry in slices):
            axis.barh(0, 0, color=_COLORS[name], label=name)
    figure.legend(loc="outside lower center", ncols=len(_COLORS), frameon=False, fontsize=8)
    axis.set_title(title, fontsize=10)
    figure.draw_without_rendering()  # places the axis, so that widths in pixels are known
    for entry in slices:
        if entry["cat"] in _NAMED and entry["dur"] > _MIN_SHARE * end:
            _write_name(axis, entry, rows[entry["pid"], entry["tid"]])
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _write_name(axis: Any, entry: dict[str, Any], row: int) -> None:
    """Write a slice's name into it, or as many of its words as fit."""
    left, right = axis.transData.transform([(entry["ts"], 0), (entry["ts"] + entry["dur"], 0)])[:, 0]
    room = right - left - 2 * _PADDING * axis.figure.dpi / 72
    style = {"xytext": (_PADDING, 0), "textcoords": "offset points"}
    text = axis.annotate("", (entry["ts"], row), va="center", fontsize=6.5, color="white", **style)
    for name in shortened(entry["name"]):
        text.set_text(name)
        if text.get_window_extent().width <= room:
            return
    text.remove()


def shortened(name: str) -> list[str]:
    """Return a name and what may stand for it, longest first: without the rank, then the first of its words alone."""
    words = re.sub(r" (of|to) rank \d+$", "", name)
    return list(dict.fromkeys((name, words, words.split(" ")[0])))


def _draw_arrows(axis: Any, entries: list[dict[str, Any]], rows: dict[tuple[int, int], int]) -> None:
    begins = {entry["id"]: entry for entry in entries if entry["ph"] == "s"}
    for entry in entries:
        if entry["ph"] == "f" and (begin := begins.get(entry["id"])) is not None:
            ends = [(one["ts"], rows.get((one["pid"], one["tid"]))) for one in (begin, entry)]
            if any(row is None for _, row in ends):
                continue  # the slice of one end reaches beyond the picture
            style = {"arrowstyle": "->", "color": "#444444", "linewidth": 0.5, "alpha": 0.6}
            axis.annotate("", xy=ends[1], xytext=ends[0], arrowprops=style)
