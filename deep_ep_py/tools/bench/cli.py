"""The command line of the benchmark."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from deep_ep_py.base.files import check_writable, write_json
from deep_ep_py.base.options import PICTURES, OutputFile
from deep_ep_py.base.pictures import INSTALL_HINT, can_plot
from deep_ep_py.errors import DeepEPError
from deep_ep_py.tools.bench import config as limits
from deep_ep_py.tools.bench.config import BenchConfig, CapabilityError
from deep_ep_py.tools.bench.gpu import run_bench_on_gpu
from deep_ep_py.tools.bench.gpu_nodes import machines, require_nodes
from deep_ep_py.tools.bench.gpu_ranks import require_gpu
from deep_ep_py.tools.bench.launch import launch, torchrun_rank, under_torchrun
from deep_ep_py.tools.bench.plots import plot_report
from deep_ep_py.tools.bench.processes import RankFailed
from deep_ep_py.tools.bench.progress import BenchProgress, make_console
from deep_ep_py.tools.bench.results import report as make_report
from deep_ep_py.tools.bench.tables import print_report, print_verdict
from deep_ep_py.tools.bench.worker import run_bench

_DEFAULTS = BenchConfig()
_DEFAULT_PLOT = Path("out/bench.png")
_GPU_ITERATIONS = 50


def _split_sizes(context: click.Context, option: click.Parameter, values: tuple[str, ...]) -> tuple[int, ...]:
    del context, option
    try:
        return tuple(dict.fromkeys(int(part) for value in values for part in value.split(",")))
    except ValueError as error:
        raise click.BadParameter("expected whole numbers: --tokens 128 --tokens 4096, or --tokens 128,4096") from error


def _split_names(context: click.Context, option: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    del context, option
    return tuple(dict.fromkeys(part for value in values for part in value.split(",") if part))


@click.command(context_settings={"show_default": True, "help_option_names": ["-h", "--help"]})
@click.option("--mode", type=click.Choice(limits.MODES), default=_DEFAULTS.mode)
@click.option("--device", type=click.Choice(limits.DEVICES), default=_DEFAULTS.device, help="Where kernels run.")
@click.option("--ranks", type=int, default=None, help="Number of ranks.  [default: 8, or torchrun's]")
@click.option(
    "--nodes",
    type=int,
    default=None,
    help="Nodes over which ranks are spread.  [default: 1; with --device cuda torchrun's machines]",
)
@click.option(
    "--hops",
    type=click.IntRange(0, 2),
    default=_DEFAULTS.hops,
    help="Hops of a row to another node: 1, directly to its rank; 2, through a rank that forwards it there; 0: two if "
    "nodes have several ranks.",
)
@click.option(
    "--fabric", type=click.Choice(limits.FABRICS), default=None, help="What joins nodes.  [default: ibgda on CPUs]"
)
@click.option(
    "--provider",
    default="",
    show_default="the best available",
    help="libfabric provider, with --fabric proxy.",
)
@click.option(
    "--heap",
    type=click.Choice(limits.HEAPS),
    default=None,
    help="Where GPU heaps are; nvshmem: in NVSHMEM's heap, whose queue pairs then join nodes.  [default: nvshmem "
    "between machines that are set up for it, if no --fabric is named]",
)
@click.option(
    "--tokens",
    multiple=True,
    callback=_split_sizes,
    default=[",".join(map(str, _DEFAULTS.tokens))],
    help="Tokens per rank. For several sizes, repeat the option or separate them by commas.",
)
@click.option("--hidden", type=int, default=_DEFAULTS.hidden, help="Elements per row.")
@click.option("--topk", type=int, default=_DEFAULTS.topk, help="Experts per token.")
@click.option("--experts", type=int, default=_DEFAULTS.experts, help="Total number of experts.")
@click.option(
    "--dtype",
    type=click.Choice(limits.DTYPES),
    default=_DEFAULTS.dtype,
    help="Type of the rows that dispatch carries; fp8 has a scale per 128 elements. In normal mode fp8 is measured "
    "without combine, which takes only BF16; in low-latency mode dispatch casts the rows.",
)
@click.option("--routing", type=click.Choice(limits.ROUTINGS), default=_DEFAULTS.routing, help="Choice of experts.")
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=_DEFAULTS.seed, help="Of rows and routing.")
@click.option(
    "--baseline",
    "baselines",
    multiple=True,
    callback=_split_names,
    metavar="NAME",
    help=f"Also measure this baseline: {', '.join(limits.BASELINES_OF['normal'])}; in low-latency mode "
    f"{', '.join(limits.BASELINES_OF['low-latency'])}. Repeat the option or separate names by commas.",
)
@click.option(
    "--num-sms", type=int, default=_DEFAULTS.num_sms, help="Blocks of each rank's kernels; 0: the Buffer's default."
)
@click.option(
    "--keep", type=int, default=_DEFAULTS.keep, help="How many earlier dispatch outputs stay alive, as in training."
)
@click.option("--iterations", type=int, default=None, help="Timed iterations.  [default: 15; with --device cuda 50]")
@click.option("--warmup", type=int, default=_DEFAULTS.warmup, help="Untimed iterations first.")
@click.option("--chain", type=int, default=_DEFAULTS.chain, help="Pairs run back to back in a sample of `pair`.")
@click.option("--json", "json_file", type=OutputFile(), help="Write the report here.")
@click.option(
    "--plot",
    "plot_file",
    type=OutputFile(*PICTURES),
    help=f"Write the plot (PNG) here.  [default: {_DEFAULT_PLOT}]",
)
@click.option("--no-plot", is_flag=True, help="Write no plot.")
@click.option("--corrupt", type=click.Choice(limits.CORRUPTIBLE), default=None, hidden=True)
def command(
    ranks: int | None,
    nodes: int | None,
    iterations: int | None,
    json_file: Path | None,
    plot_file: Path | None,
    no_plot: bool,
    **options: Any,
) -> None:
    """Time dispatch and combine, check them against an oracle, and compare with baselines.

    Starts the ranks itself, as processes pinned to cores; under torchrun it uses torchrun's. With --device cuda the
    ranks are threads that share one GPU or, under torchrun, processes with a GPU each, on one or several machines; then
    only their kernels are timed. The exit code is 1 if a result is wrong.
    """
    if iterations is None:
        iterations = _GPU_ITERATIONS if options["device"] == "cuda" else _DEFAULTS.iterations
    try:
        bench_config = BenchConfig(
            ranks=_default_ranks() if ranks is None else ranks,
            nodes=_default_nodes(options["device"]) if nodes is None else nodes,
            iterations=iterations,
            **options,
        )
        bench_config.validate()
        if bench_config.device == "cuda":
            _require_gpu()
            require_nodes(bench_config)
    except (ValueError, CapabilityError) as error:
        raise click.UsageError(str(error)) from error
    if plot_file is not None and not can_plot():
        raise click.UsageError(f"--plot: {INSTALL_HINT}")
    plot_file = None if no_plot else plot_file or _DEFAULT_PLOT
    if plot_file is not None and torchrun_rank() == 0:
        _check_default(plot_file)
    console = make_console(quiet=torchrun_rank() != 0)
    console.print(
        f"Timing dispatch and combine in {bench_config.mode} mode on {bench_config.ranks} ranks, for "
        f"{' and '.join(map(str, bench_config.tokens))} tokens on each: {bench_config.warmup} untimed iterations, then "
        f"{bench_config.iterations} timed ones. The results of the last are checked."
    )
    report = _measure(bench_config, console)
    print_report(report, console)
    if torchrun_rank() == 0:
        _write(report, json_file, plot_file, console)
    print_verdict(report, console)
    if not report["verified"]:
        raise SystemExit(1)


def _check_default(plot_file: Path) -> None:
    try:
        check_writable(plot_file)
    except OSError as error:
        raise click.UsageError(f"--plot: cannot be written: {error}; name another file, or use --no-plot") from error


def _require_gpu() -> None:
    try:
        require_gpu()
    except ValueError as error:
        raise CapabilityError(f"--device cuda: {error}; use --device cpu") from error


def _default_ranks() -> int:
    return int(os.environ["WORLD_SIZE"]) if under_torchrun() else _DEFAULTS.ranks


def _default_nodes(device: str) -> int:
    return machines() if device == "cuda" and under_torchrun() else _DEFAULTS.nodes


def _measure(bench_config: BenchConfig, console: Console) -> dict[str, Any]:
    try:
        with BenchProgress(console) as progress:
            if bench_config.device == "cuda":
                sizes = run_bench_on_gpu(bench_config, progress.on_event)
            else:
                sizes = launch(run_bench, bench_config.ranks, (bench_config,), progress.on_event)
    except (RankFailed, DeepEPError) as error:
        raise click.ClickException(str(error)) from error
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    return make_report(bench_config, sizes)


def _write(report: dict[str, Any], json_file: Path | None, plot_file: Path | None, console: Console) -> None:
    if json_file is not None:
        write_json(json_file, report)
        console.print(f"report: {json_file}")
    if plot_file is None:
        return
    if can_plot():
        plot_report(report, plot_file)
        console.print(f"picture: {plot_file}")
    else:
        console.print(f"no picture: {INSTALL_HINT}", markup=False)
