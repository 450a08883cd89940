"""The report of the training: a table, a verdict and a picture."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from deep_ep_py.examples.picture import pyplot_for, save_picture
from deep_ep_py.examples.train_model import TrainConfig

BOUND = 1e-3
"""Bound for the difference of two losses, in nats per byte."""
_LINES = 10


@dataclass(frozen=True)
class Verdict:
    """The verdict on a training run.

    Attributes
    ----------
    before, after : float
        Mean loss of the first and the last tenth of the steps.
    difference : float or None
        The largest difference from the losses of one process, or nan if any is nan; None without that comparison.
    """

    before: float
    after: float
    difference: float | None

    @property
    def passed(self) -> bool:
        """Whether the loss fell and agrees with that of one process."""
        same = self.difference is None or self.difference <= BOUND
        return self.after < self.before and same


def verdict(figures: dict[str, Any]) -> Verdict:
    """Return the verdict on the figures that rank 0 returned."""
    losses = figures["losses"]
    tenth = max(len(losses) // 10, 1)
    difference = None
    if "reference" in figures:
        apart = [abs(ours - one) for ours, one in zip(losses, figures["reference"], strict=True)]
        difference = max(apart, key=lambda value: (math.isnan(value), value))
    return Verdict(statistics.mean(losses[:tenth]), statistics.mean(losses[-tenth:]), difference)


def print_training(figures: dict[str, Any], config: TrainConfig, console: Console) -> None:
    """Print the losses, the times and the verdict.

    Parameters
    ----------
    figures
        The figures that rank 0 returned.
    config
        The configuration of the training.
    console
        The console to print to.
    """
    reference = figures.get("reference")
    table = Table(title="loss in nats per byte", title_justify="left", box=box.SIMPLE_HEAD)
    for name in ("step", f"{config.ranks} ranks", *(["one process", "difference"] if reference else [])):
        table.add_column(name, justify="right")
    last = len(figures["losses"]) - 1
    for step in sorted({round(line * last / (_LINES - 1)) for line in range(_LINES)}):
        ours = figures["losses"][step]
        row = [str(step), f"{ours:.4f}"]
        if reference:
            row += [f"{reference[step]:.4f}", f"{abs(ours - reference[step]):.1e}"]
        table.add_row(*row)
    console.print(table)
    step_ms = statistics.median(figures["milliseconds"])
    console.print(
        f"a step: median {step_ms:.1f} ms on {config.ranks} ranks, with {figures['operations'] / config.steps:g} "
        "dispatches and combines, including those of the backward"
    )
    if reference:
        console.print(f"  in one process: {statistics.median(figures['reference_milliseconds']):.1f} ms")
    judged = verdict(figures)
    word = "[green]passed[/]" if judged.passed else "[red]FAILED[/]"
    same = "" if judged.difference is None else f"; at most {judged.difference:.1e} from one process"
    console.print(f"{word}: the loss goes from {judged.before:.3f} to {judged.after:.3f}{same} (bound {BOUND:g})")


def plot_training(figures: dict[str, Any], config: TrainConfig, path: Path, console: Console) -> None:
    """Plot the losses and their difference.

    Parameters
    ----------
    figures
        The figures that rank 0 returned.
    config
        The configuration of the training.
    path
        The PNG file to write; its folder is created.
    console
        Gets a line with the path of the picture, or the reason why there is none.
    """
    pyplot = pyplot_for(console)
    if pyplot is None:
        return
    reference = figures.get("reference")
    figure, axes = pyplot.subplots(1, 2 if reference else 1, figsize=(11, 4.2), squeeze=False, layout="constrained")
    losses = axes[0][0]
    losses.plot(figures["losses"], color="#0b6e4f", linewidth=3, label=f"{config.ranks} ranks")
    losses.set(title="loss", xlabel="step", ylabel="nats per byte")
    if reference:
        losses.plot(reference, color="#d98e04", linewidth=1, label="one process")
        apart = [abs(ours - one) for ours, one in zip(figures["losses"], reference)]
        axes[0][1].semilogy(apart, color="#7a7a7a")
        axes[0][1].axhline(BOUND, color="#b3423a", linestyle="--", label="bound")
        axes[0][1].set(title="difference of the two", xlabel="step")
    for axis in axes[0]:
        axis.legend()
        axis.spines[["top", "right"]].set_visible(False)
    save_picture(figure, path, console)
    pyplot.close(figure)
