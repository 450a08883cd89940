"""The command `compile`: fills the kernel cache and reports what each kernel uses of an SM. Needs no GPU."""

from __future__ import annotations

import sys
from pathlib import Path

import click
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from deep_ep_py.base.arguments import MAX_RANKS
from deep_ep_py.base.files import write_json
from deep_ep_py.base.options import OutputFile
from deep_ep_py.device.jit import (
    GATHERED,
    KERNELS,
    KernelCache,
    NvrtcUnavailableError,
    Shape,
    compile_kernel,
    require_nvrtc,
)
from deep_ep_py.device.jit.cache import FOLDER_VARIABLE, Compile
from deep_ep_py.device.jit.options import Architecture
from deep_ep_py.device.jit.registry import ANY_FABRIC
from deep_ep_py.device.jit.report import Outcome, as_json, as_table, compile_each

_BY_NAME = {kernel.name: kernel for kernel in (*KERNELS.values(), *GATHERED.values())}
_DEFAULTS = Shape()
_ELEMENT_BYTES = 2
_PIECE_BYTES = 16


def _compile(
    names: list[str], architectures: list[str], shape: Shape, compile_: Compile, console: Console
) -> list[Outcome]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    outcomes = []
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("compiling", total=len(names) * len(architectures))
        for outcome in compile_each([_BY_NAME[name] for name in names], architectures, shape, compile_):
            outcomes.append(outcome)
            progress.update(task, advance=1, description=f"{outcome.kernel} for {outcome.architecture}")
    return outcomes


@click.command(name="compile", context_settings={"show_default": True, "help_option_names": ["-h", "--help"]})
@click.option(
    "--all",
    "every",
    is_flag=True,
    show_default=False,
    help="Compile all kernels that a Buffer with these options may launch.",
)
@click.option(
    "--kernel",
    "kernels",
    multiple=True,
    type=click.Choice(list(_BY_NAME)),
    metavar="NAME",
    help="Compile this one, such as dispatch; repeatable. A wrong name lists all.",
)
@click.option(
    "--arch",
    "architectures",
    multiple=True,
    type=Architecture(),
    default=("sm_90a",),
    help="Such as sm_90a; repeatable.",
)
@click.option("--ranks", type=click.IntRange(1, MAX_RANKS), default=_DEFAULTS.ranks)
@click.option(
    "--hidden", type=click.IntRange(1), default=_DEFAULTS.row_bytes // _ELEMENT_BYTES, help="BF16 values per row."
)
@click.option("--topk", type=click.IntRange(1, 32), default=_DEFAULTS.topk, help="Experts per token.")
@click.option("--experts", type=click.IntRange(1, 2048), default=_DEFAULTS.experts, help="Total number of experts.")
@click.option(
    "--fabric",
    "fabrics",
    multiple=True,
    type=click.Choice(ANY_FABRIC),
    help="How ranks are reached that are not mapped; repeatable. Default: all are mapped.",
)
@click.option("--masks-ranks", is_flag=True, show_default=False, help="For Buffers with enable_shrink.")
@click.option("--fresh", is_flag=True, show_default=False, help="Compile again and bypass the cache.")
@click.option(
    "--cache",
    "folder",
    type=click.Path(file_okay=False, path_type=Path),
    help=f"Where compiled kernels are kept.  [default: {FOLDER_VARIABLE}, else the user's cache folder]",
)
@click.option("--json", "json_file", type=OutputFile(), help="Also write the report here.")
def command(
    every: bool,
    kernels: tuple[str, ...],
    architectures: tuple[str, ...],
    ranks: int,
    hidden: int,
    topk: int,
    experts: int,
    fabrics: tuple[str, ...],
    masks_ranks: bool,
    fresh: bool,
    folder: Path | None,
    json_file: Path | None,
) -> None:
    """Compile GPU kernels with NVRTC and list registers, shared memory and spills. Needs no GPU.

    Compiled kernels are cached: the next call with the same sources, options and architecture finds them.
    """
    if every == bool(kernels):
        raise click.UsageError("expected either --all or --kernel NAME")
    if hidden * _ELEMENT_BYTES % _PIECE_BYTES:
        raise click.BadParameter("a row must be a multiple of 16 bytes", param_hint="--hidden")
    try:
        require_nvrtc()
    except NvrtcUnavailableError as error:
        raise click.ClickException(str(error)) from None
    # A pipe has no width: use one that fits the table.
    console = Console(width=None if sys.stdout.isatty() else 80, highlight=False)
    sizes = (ranks, hidden * _ELEMENT_BYTES, topk, experts)
    shape = Shape(*sizes, fabrics=tuple(sorted(set(fabrics))), masks_ranks=masks_ranks)
    loaded = [name for name in KERNELS if fabrics or not name.startswith("two_hops")]  # by a Buffer of these options
    names = loaded if every else list(dict.fromkeys(kernels))
    cache = KernelCache(folder)
    compile_ = compile_kernel if fresh else cache.get
    try:
        outcomes = _compile(names, list(dict.fromkeys(architectures)), shape, compile_, console)
    except PermissionError as error:  # a folder that others may write
        raise click.ClickException(str(error)) from None
    console.print(as_table(outcomes, shape))
    failures = [outcome for outcome in outcomes if outcome.compiled is None]
    for failure in failures:
        console.print(f"[red]{escape(failure.error)}")
    if json_file is not None:
        write_json(json_file, as_json(outcomes, shape))
        console.print(f"Report: {json_file}")
    if not fresh:
        console.print(f"Cache: {cache.folder}")
    if failures:
        raise SystemExit(1)
