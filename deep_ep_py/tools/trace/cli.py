"""The command `python -m deep_ep_py trace`."""

from __future__ import annotations

from pathlib import Path

import click
from rich import box
from rich.console import Console
from rich.table import Table

from deep_ep_py.base.choices import STAGES
from deep_ep_py.base.options import PICTURES, OutputFile
from deep_ep_py.base.pictures import INSTALL_HINT, can_plot
from deep_ep_py.session.timeline.chrome import write
from deep_ep_py.tools.trace.explain import Explained, explain
from deep_ep_py.tools.trace.merge import Timeline, cut, merge, read
from deep_ep_py.tools.trace.picture import draw
from deep_ep_py.tools.trace.stages import stages_of

_WAITS_SHOWN = 3
_STANDS_STILL = "All durations are 0: under run_ranks on a CPU the clock is virtual, and stands still while ranks work."
_FILES = click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """Join, explain and draw recorded timelines.

    They are recorded by `Buffer.trace` or DEEP_EP_TRACE. A timeline opens in https://ui.perfetto.dev or chrome://tracing.
    """


@command.command("merge")
@_FILES
@click.option("-o", "--output", type=OutputFile(), required=True, help="The file of the merged timeline.")
def merge_command(files: tuple[Path, ...], output: Path) -> None:
    """Join the timelines of several ranks.

    Arrows lead from the signals of software NICs to the waits that they end.
    """
    merged = _merged(files)
    write(output, merged["traceEvents"], merged["metadata"])
    arrows = sum(entry["ph"] == "f" for entry in merged["traceEvents"])
    click.echo(f"{output}: {len(merged['metadata']['ranks'])} ranks, {len(merged['traceEvents'])} entries")
    if arrows:
        click.echo(f"{arrows} arrows, from signals of NICs to the waits that they end")
    else:
        click.echo("no arrows: no signal of a NIC ended a wait (ranks of one node use none)")


@command.command("explain")
@_FILES
def explain_command(files: tuple[Path, ...]) -> None:
    """Show what each operation waited for, and for which rank.

    The share of its duration that its kernels waited, the share in which none of its kernels ran (the host prepared
    them, or waited for a core), and the longest waits with the rank that each was for. The rest is the kernels' work.
    """
    found = explain(_merged(files))
    if not found:
        raise click.ClickException("there are no operations in these timelines")
    Console(highlight=False).print(_table(found))
    if not any(one.duration for one in found):
        click.echo(_STANDS_STILL)


@command.command("stages")
@_FILES
def stages_command(files: tuple[Path, ...]) -> None:
    """Show how long each stage of a kernel takes, of Buffers that were made with DEEP_EP_STAGES=on.

    For each stage, in microseconds and as the median over launches and ranks: when the last warp ended it, from the
    first warp's begin, and how long it took the slowest warp.
    """
    merged = _merged(files)
    found = stages_of(merged["traceEvents"])
    lost = sum(rank["events_lost"] for rank in merged["metadata"]["ranks"])
    if not found:
        raise click.ClickException(
            f"there are no stages in these timelines: set {STAGES}=on before Buffers are made, and end a recording "
            f"after its kernels ({lost} launches or events were not kept)"
        )
    if lost:
        click.echo(f"{lost} launches or events were not kept")
    table = Table(box=box.SIMPLE_HEAD)
    for title in ("kernel", "stage"):
        table.add_column(title)
    for title in ("last end, us", "slowest, us", "launches"):
        table.add_column(title, justify="right")
    for stage in found:
        figures = (f"{stage.end:.2f}", f"{stage.duration:.2f}", str(len(stage.ends)))
        table.add_row(stage.kernel, stage.name, *figures)
    Console(highlight=False).print(table)
    if not any(stage.end for stage in found):
        click.echo(_STANDS_STILL)


@command.command("draw")
@_FILES
@click.option("-o", "--output", type=OutputFile(*PICTURES), required=True, help="The picture: .png, .svg or .pdf.")
@click.option("--title", default="", help="Its title.")
@click.option("--operation", type=click.IntRange(min=0), help="Draw only this operation.")
def draw_command(files: tuple[Path, ...], output: Path, title: str, operation: int | None) -> None:
    """Draw timelines; needs matplotlib."""
    if not can_plot():
        raise click.ClickException(INSTALL_HINT)
    timeline = _merged(files)
    if operation is not None:
        try:
            timeline = cut(timeline, operation)
        except ValueError as error:
            raise click.ClickException(str(error)) from None
    draw(timeline, output, title)
    click.echo(f"picture: {output}")


def _merged(files: tuple[Path, ...]) -> Timeline:
    try:
        timelines = [read(path) for path in files]
        if len(timelines) == 1 and "rank" not in timelines[0]["metadata"]:
            return timelines[0]  # merged already
        return merge(timelines)
    except ValueError as error:
        raise click.ClickException(str(error)) from None


def _table(found: list[Explained]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("rank", justify="right")
    table.add_column("operation")
    for title in ("ms", "waits", "host"):
        table.add_column(title, justify="right")
    table.add_column("longest waits, in ms", overflow="fold")
    for one in found:
        waits = [f"{spent / 1e3:.3g} {_named(*key)}" for key, spent in one.waits.items()][:_WAITS_SHOWN]
        table.add_row(
            str(one.rank),
            f"{one.name} {one.operation}",
            f"{one.duration / 1e3:.3g}",
            f"{one.share:.0%}",
            f"{one.host_share:.0%}",
            "\n".join(waits),
        )
    return table


def _named(phase: str, peer: int) -> str:
    return phase if peer < 0 else f"{phase} of rank {peer}"
