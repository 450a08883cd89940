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
from deep_ep_py.tools.bench.machine import usable_cores
from deep_ep_py.tools.bench.tables import cores_text

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
        return self.after < self.before and self.agrees

    @property
    def agrees(self) -> bool:
        """Whether no loss differs from that of one process, as far as they were compared."""
        return self.difference is None or self.difference <= BOUND


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
    """Print the losses and the times.

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
    cores = len(usable_cores())
    shared = f", which share {cores_text(cores)}" if cores < config.ranks else ""
    console.print(
        f"a step: {statistics.median(figures['milliseconds']):.0f} ms on {config.ranks} ranks{shared}, with "
        f"{figures['operations'] / config.steps:g} dispatches and combines, forward and backward"
    )
    if reference:
        console.print(f"  in one process: {statistics.median(figures['reference_milliseconds']):.0f} ms")


def print_verdict(judged: Verdict, config: TrainConfig, console: Console) -> None:
    """Print whether the losses are right, and what they were compared with.

    Parameters
    ----------
    judged
        The verdict.
    config
        The configuration of the training.
    console
        The console to print to.
    """
    word = "[green]correct[/]" if judged.passed else "[red]WRONG[/]"
    falls = "falls" if judged.after < judged.before else "does not fall"
    text = f"{word}: the loss {falls}, from {judged.before:.3f} to {judged.after:.3f} nats per byte, and "
    if judged.difference is None:
        console.print(f"{text}was not compared with that of one process (--no-check).")
        return
    equals = "equals" if judged.agrees else "differs from"
    console.print(
        f"{text}{equals} that of one process in each of {config.steps} steps: largest difference "
        f"{judged.difference:.1e}, bound {BOUND:g}."
    )


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
    losses.set(title="loss of each step", xlabel="step", ylabel="nats per byte")
    if reference:
        losses.plot(reference, color="#d98e04", linewidth=1, label="one process")
        apart = [abs(ours - one) for ours, one in zip(figures["losses"], reference)]
        axes[0][1].semilogy(apart, color="#7a7a7a")
        axes[0][1].axhline(BOUND, color="#b3423a", linestyle="--", label="bound")
        axes[0][1].set(title="difference of the two losses", xlabel="step")
    for axis in axes[0]:
        axis.legend()
        axis.spines[["top", "right"]].set_visible(False)
    save_picture(figure, path, console)
    pyplot.close(figure)
