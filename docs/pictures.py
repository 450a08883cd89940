"""Draw the pictures of concepts.md from what real runs return: 4 ranks on a CPU, with a handful of tokens.

    make docs-pictures                          # writes docs/pictures/*.svg
    python docs/pictures.py --folder FOLDER     # writes them to another folder; needs matplotlib

Nothing here is drawn from knowledge of what the library should do: rows are placed by what dispatch returned, and each
picture's values are checked against each other before they are drawn.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import torch

import deep_ep_py as deep_ep
from deep_ep_py.testing import ThreadGroup, run_ranks

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402 - after the choice of a backend
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from matplotlib.patches import FancyBboxPatch, Rectangle  # noqa: E402

HERE = Path(__file__).resolve().parent
RANKS, TOKENS, TOPK, HIDDEN, MAX_TOKENS = 4, 3, 2, 128, 4
EXPERTS = 2 * RANKS
COLORS = ("#3b76b0", "#c8632a", "#4d8f4d", "#8a5a9e")
PALE = ("#d6e4f1", "#f6ddcd", "#d9ead9", "#e8dcee")
GRAY, DARK = "#8a8a8a", "#222222"
CHOICES = (
    ((0, 5), (2, 3), (6, -1)),
    ((1, 0), (4, 7), (3, 6)),
    ((5, 4), (0, 2), (7, 1)),
    ((6, 7), (1, 4), (5, 3)),
)
"""The experts of each rank's tokens. Rank r holds experts 2 r and 2 r + 1; -1 is no expert."""


@dataclass(frozen=True)
class Exchange:
    """What one rank of a dispatch and its combine was given and got."""

    sent: list[str]
    choices: list[list[int]]
    received: list[str]
    local_ids: list[list[int]]
    prefix: list[list[int]]
    source_index: list[int]
    outputs: list[float]
    combined: list[float]


def name(value: float) -> str:
    """Return the name of a token whose row is filled with this number."""
    rank, token = divmod(int(value), 10)
    return f"r{rank} t{token}"


def tokens_of(rank: int) -> torch.Tensor:
    """Return a rank's tokens: rows filled with 10 * rank + token, so that a row says where it comes from."""
    return (10.0 * rank + torch.arange(TOKENS)).bfloat16()[:, None].repeat(1, HIDDEN)


def exchange(group: ThreadGroup) -> Exchange:
    """Dispatch this rank's tokens, let each expert add up what it holds, and combine."""
    rank = group.rank()
    x, topk_idx = tokens_of(rank), torch.tensor(CHOICES[rank])
    with deep_ep.Buffer(group, num_nvl_bytes=1 << 20) as buffer:
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, EXPERTS)
        recv_x, recv_idx, _, _, handle, _ = buffer.dispatch(
            x,
            topk_idx=topk_idx,
            topk_weights=torch.ones(TOKENS, TOPK),
            num_tokens_per_rank=per_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
        )
        assert recv_idx is not None
        # Expert e returns e + 1 in every element: a token's sum then says which experts it has been to.
        first = EXPERTS // RANKS * rank
        made = torch.where(recv_idx >= 0, recv_idx + first + 1, 0).sum(1).bfloat16()
        combined, _, _ = buffer.combine(made[:, None].repeat(1, HIDDEN), handle)
        for choices, total in zip(CHOICES[rank], combined[:, 0].tolist()):
            assert total == sum(choice + 1 for choice in choices if choice >= 0)
        return Exchange(
            [name(value) for value in x[:, 0].tolist()],
            topk_idx.tolist(),
            [name(value) for value in recv_x[:, 0].tolist()],
            recv_idx.tolist(),
            handle[0].tolist(),
            handle[3].tolist(),
            made.tolist(),
            combined[:, 0].tolist(),
        )


def low_latency(group: ThreadGroup) -> tuple[list[list[str]], list[int]]:
    """Return the rows that each expert of this rank receives in low-latency mode, and their number."""
    rank = group.rank()
    size = deep_ep.Buffer.get_low_latency_rdma_size_hint(MAX_TOKENS, HIDDEN, RANKS, EXPERTS)
    with deep_ep.Buffer(group, 0, size, low_latency_mode=True) as buffer:
        packed, counts, _, _, _ = buffer.low_latency_dispatch(
            tokens_of(rank), torch.tensor(CHOICES[rank]), MAX_TOKENS, EXPERTS, use_fp8=False
        )
        assert isinstance(packed, torch.Tensor) and packed.shape[1] == RANKS * MAX_TOKENS
        rows = [[name(value) for value in one[:count, 0].tolist()] for one, count in zip(packed, counts.tolist())]
        return rows, counts.tolist()


def kept_outputs(group: ThreadGroup, arena_bytes: int, dispatches: int) -> list[dict[str, int]]:
    """Return the Buffer's statistics after each of some dispatches whose outputs are all kept, then all dropped."""
    topk_idx = torch.arange(64)[:, None] % EXPERTS
    x = torch.zeros(64, 1024).bfloat16()
    with deep_ep.Buffer(group, num_nvl_bytes=1 << 20, arena_bytes=arena_bytes) as buffer:
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, EXPERTS)
        kept, stats = [], []
        for step in range(dispatches + 2):
            if step == dispatches:
                kept.clear()
            recv_x, *_ = buffer.dispatch(
                x,
                num_tokens_per_rank=per_rank,
                is_token_in_rank=in_rank,
                num_tokens_per_expert=per_expert,
            )
            kept.append(recv_x)
            stats.append(buffer.stats())
        return stats


def canvas(width: float, height: float) -> tuple[Figure, Axes]:
    """Return a figure of this many inches without axes, whose units are tenths of an inch, from the upper left."""
    figure = pyplot.figure(figsize=(width, height))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, 10 * width)
    axes.set_ylim(10 * height, 0)
    axes.axis("off")
    return figure, axes


def text(axes: Axes, x: float, y: float, words: str, size: float = 11, color: str = DARK, **options: Any) -> None:
    """Write words, centered unless told otherwise."""
    axes.text(x, y, words, fontsize=size, color=color, **{"ha": "center", "va": "center", **options})


def row_box(axes: Axes, x: float, y: float, width: float, token: str, words: str = "", height: float = 2.6) -> None:
    """Draw a row in the color of the rank that its token is from; `y` is its middle."""
    rank = int(token[1])
    box = FancyBboxPatch(
        (x, y - height / 2), width, height, boxstyle="round,pad=0,rounding_size=0.5", fc=PALE[rank], ec=COLORS[rank]
    )
    axes.add_patch(box)
    text(axes, x + width / 2, y, words or token)


def frame(axes: Axes, x: float, y: float, width: float, height: float, title: str, color: str) -> None:
    """Draw the frame of a rank, with a title above it."""
    axes.add_patch(Rectangle((x, y), width, height, fill=False, ec=color, lw=1.2))
    text(axes, x, y - 1.4, title, 12, color, ha="left", weight="bold")


def places(results: list[Exchange], of: Callable[[Exchange], list[str]], top: float, gap: float) -> list[list[float]]:
    """Return the height of the middle of each row, rank below rank."""
    found, y = [], top
    for result in results:
        found.append([y + 1.9 + 3.2 * row for row in range(len(of(result)))])
        y += 3.2 * len(of(result)) + 0.6 + gap
    return found


def link(axes: Axes, start: tuple[float, float], end: tuple[float, float], color: str) -> None:
    """Draw an arrow from a row to where it goes."""
    style = {"arrowstyle": "-|>", "color": color, "lw": 1.3, "shrinkA": 0, "shrinkB": 0, "mutation_scale": 11}
    axes.annotate("", end, start, arrowprops=style)


def draw_dispatch(results: list[Exchange]) -> Figure:
    """Draw which token goes to which rank, and where its row lies there."""
    most = sum(len(result.received) for result in results)
    right = places(results, lambda result: result.received, 8, 4.2)
    left = places(results, lambda result: result.sent, 8, 4.2 + 3.2 * (most / RANKS - TOKENS))
    figure, axes = canvas(8.6, (right[-1][-1] + 4) / 10)
    text(axes, 2, 2.4, "its tokens, and the experts that they chose", 12, ha="left")
    text(axes, 57, 2.4, "recv_x and recv_topk_idx", 12, ha="left")
    for rank, result in enumerate(results):
        held = f"rank {rank}, with experts {2 * rank} and {2 * rank + 1}"
        frame(axes, 2, left[rank][0] - 1.9, 27, 3.2 * TOKENS + 0.6, f"rank {rank}", COLORS[rank])
        frame(axes, 57, right[rank][0] - 1.9, 27, 3.2 * len(result.received) + 0.6, held, COLORS[rank])
        for y, token, choices in zip(left[rank], result.sent, result.choices):
            row_box(axes, 3, y, 9, token)
            chosen = ", ".join(str(choice) for choice in choices if choice >= 0)
            text(axes, 20, y, f"expert{'s' if -1 not in choices else ''} {chosen}")
        for y, token, ids in zip(right[rank], result.received, result.local_ids):
            row_box(axes, 58, y, 9, token)
            text(axes, 75, y, f"[{ids[0]}, {ids[1]}]")
            source, sent = int(token[1]), int(token[4:])
            link(axes, (29, left[source][sent]), (57, y), COLORS[source])
    return figure


def draw_handle(results: list[Exchange]) -> Figure:
    """Draw how rank_prefix_matrix divides the rows of a rank among their sources."""
    shown, prefix = 2, results[2].prefix
    result = results[shown]
    figure, axes = canvas(8.6, 3.6)
    text(axes, 2, 2.4, "handle[0], rank_prefix_matrix", 12, ha="left")
    for source in range(RANKS):
        sources = f"from ranks 0 to {source}" if source else "from rank 0"
        text(axes, 2, 12.5 + 6 * source, sources, 11, COLORS[source], ha="left")
        text(axes, 22 + 6 * source, 7.6, f"to {source}", 11, COLORS[source])
        for destination in range(RANKS):
            here = destination == shown
            face = PALE[source] if here else "white"
            axes.add_patch(Rectangle((19 + 6 * destination, 9.5 + 6 * source), 6, 6, fc=face, ec=GRAY))
            weight = "bold" if here else "normal"
            text(axes, 22 + 6 * destination, 12.5 + 6 * source, str(prefix[source][destination]), 13, weight=weight)
    text(axes, 51.5, 2.4, f"rank {shown}: recv_x, and handle[3]", 12, ha="left")
    for row, (token, index) in enumerate(zip(result.received, result.source_index)):
        y = 7.6 + 3.4 * row
        text(axes, 50, y, f"row {row}", 11, GRAY, ha="right")
        row_box(axes, 51.5, y, 9, token)
        text(axes, 66, y, f"token {index}")
    begin = 0
    for source in range(RANKS):
        end = prefix[source][shown]
        assert [int(token[1]) for token in result.received[begin:end]] == [source] * (end - begin)
        if end > begin:
            top, bottom = 7.6 + 3.4 * begin - 1.3, 7.6 + 3.4 * (end - 1) + 1.3
            axes.plot([71.4, 72, 72, 71.4], [top, top, bottom, bottom], color=COLORS[source], lw=1.5)
            text(axes, 73, (top + bottom) / 2, f"[{begin}:{end}]", 11, COLORS[source], ha="left")
        begin = end
    return figure


def draw_combine(results: list[Exchange]) -> Figure:
    """Draw how the experts' outputs come back, and what they are summed to."""
    most = sum(len(result.received) for result in results)
    left = places(results, lambda result: result.received, 8, 4.2)
    right = places(results, lambda result: result.sent, 8, 4.2 + 3.2 * (most / RANKS - TOKENS))
    figure, axes = canvas(8.6, (left[-1][-1] + 4) / 10)
    text(axes, 2, 2.4, "its rows, and what its experts make of them", 12, ha="left")
    text(axes, 57, 2.4, "combined_x", 12, ha="left")
    parts: dict[str, list[float]] = {}
    for rank, result in enumerate(results):
        frame(axes, 2, left[rank][0] - 1.9, 27, 3.2 * len(result.received) + 0.6, f"rank {rank}", COLORS[rank])
        frame(axes, 57, right[rank][0] - 1.9, 27, 3.2 * TOKENS + 0.6, f"rank {rank}", COLORS[rank])
        for y, token, value in zip(left[rank], result.received, result.outputs):
            row_box(axes, 3, y, 9, token)
            text(axes, 20, y, f"makes {value:g}")
            source, sent = int(token[1]), int(token[4:])
            link(axes, (29, y), (57, right[source][sent]), COLORS[source])
            parts.setdefault(token, []).append(value)
    for rank, result in enumerate(results):
        for y, token, value in zip(right[rank], result.sent, result.combined):
            assert value == sum(parts[token])
            row_box(axes, 58, y, 9, token)
            summed = " + ".join(f"{part:g}" for part in parts[token])
            text(axes, 75.5, y, f"{summed} = {value:g}" if len(parts[token]) > 1 else f"{value:g}")
    return figure


def draw_packed(results: list[tuple[list[list[str]], list[int]]]) -> Figure:
    """Draw what the experts of each rank receive in low-latency mode."""
    rows = RANKS * MAX_TOKENS
    figure, axes = canvas(8.6, 6.0)
    text(axes, 2, 2.4, f"packed: [2 experts, {RANKS} ranks * {MAX_TOKENS} tokens, hidden], and counts", 12, ha="left")
    y = 6.5
    for rank, (experts, counts) in enumerate(results):
        text(axes, 2, y + 0.6, f"rank {rank}", 12, COLORS[rank], ha="left", weight="bold")
        for expert, (tokens, count) in enumerate(zip(experts, counts)):
            middle = y + 4.2 + 4.2 * expert
            text(axes, 2, middle, f"expert {2 * rank + expert}", ha="left")
            for row in range(rows):
                axes.add_patch(Rectangle((11 + 3.8 * row, middle - 1.5), 3.8, 3, fc="#f4f4f4", ec="#cccccc", lw=0.7))
            for row, token in enumerate(tokens):
                source = int(token[1])
                here = Rectangle((11 + 3.8 * row, middle - 1.5), 3.8, 3, fc=PALE[source], ec=COLORS[source])
                axes.add_patch(here)
                text(axes, 12.9 + 3.8 * row, middle, token, 9.5)
            text(axes, 73, middle, f"counts[{expert}] = {count}", 10.5, ha="left")
        y += 13.8
    return figure


def draw_arena(stats: list[dict[str, int]], dispatches: int) -> Figure:
    """Draw how dispatches whose outputs are kept fill the arena, and which of them ran in rounds."""
    figure = pyplot.figure(figsize=(8.6, 3.9))
    axes = figure.add_axes((0.09, 0.15, 0.89, 0.82))
    steps = range(1, len(stats) + 1)
    before = [{"rounds": 0}, *stats]
    in_rounds = [now["rounds"] > then["rounds"] for now, then in zip(stats, before)]
    used = [now["arena_used"] / 1024 for now in stats]
    limit = stats[0]["arena_bytes"] / 1024
    axes.bar(steps, used, color=[COLORS[1] if rounds else COLORS[0] for rounds in in_rounds], width=0.66)
    axes.axhline(limit, color=DARK, lw=1.2, ls="--")
    axes.text(0.45, limit * 1.03, f"arena_bytes: {limit:.0f} KiB", fontsize=11, va="bottom")
    for step, rounds, height in zip(steps, in_rounds, used):
        word = "rounds" if rounds else "direct"
        axes.text(step, height - limit * 0.03, word, ha="center", va="top", fontsize=11, color="white")
    axes.axvline(dispatches + 0.5, color=GRAY, lw=1, ls=":")
    axes.text(dispatches + 0.58, limit * 1.03, "earlier outputs dropped", fontsize=11, color=GRAY, va="bottom")
    axes.set_xticks(list(steps))
    axes.set_xlim(0.4, len(stats) + 0.6)
    axes.set_ylim(0, limit * 1.15)
    axes.set_xlabel("dispatch", fontsize=11)
    axes.set_ylabel("arena_used, KiB", fontsize=11)
    axes.tick_params(labelsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def draw_all() -> dict[str, Figure]:
    """Run what the pictures show, and return them by name."""
    results = list(run_ranks(RANKS, exchange))
    dispatches = 5
    return {
        "dispatch": draw_dispatch(results),
        "handle": draw_handle(results),
        "combine": draw_combine(results),
        "packed": draw_packed(list(run_ranks(RANKS, low_latency))),
        "arena": draw_arena(run_ranks(RANKS, kept_outputs, 400 << 10, dispatches)[0], dispatches),
    }


def main() -> None:
    """Write the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=HERE / "pictures")
    parser.add_argument("--format", choices=("svg", "png"), default="svg")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    # The same bytes from the same matplotlib, so that a picture changes only if what it shows does.
    matplotlib.rcParams.update({"svg.hashsalt": "deep_ep_py", "font.family": "DejaVu Sans"})
    for one, figure in draw_all().items():
        path = options.folder / f"{one}.{options.format}"
        figure.savefig(path, dpi=100, metadata={"Date": None} if options.format == "svg" else None)
        print(path)


if __name__ == "__main__":
    main()
