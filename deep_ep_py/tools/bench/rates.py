"""The throughput of a kernel's blocks on this GPU, from which the default number of blocks is computed."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from rich import box
from rich.console import Console
from rich.table import Table

from deep_ep_py.base.options import OutputFile
from deep_ep_py.device.rates import Rates, destinations, rates_file
from deep_ep_py.tools.bench.gpu_nodes import machines
from deep_ep_py.tools.bench.gpu_ranks import gpu_per_rank, require_gpu
from deep_ep_py.tools.bench.gpu_timing import EventTimer, make_aligner
from deep_ep_py.tools.bench.machine import describe_machine
from deep_ep_py.transport.bootstrap.groups import make_bootstrap

BOUNDARY = (
    "The kernels of a cached dispatch of BF16 rows, which writes each row to its destination ranks, by CUDA events: "
    "the median over the iterations, for the slowest rank. Moved bytes are those that a rank reads and writes, the "
    "mean over the ranks. Several ranks are processes with a GPU each; every token goes to as many of them as it would "
    "with a top-8 of equally popular experts, and times start when a dispatch of one row per rank has ended."
)
_TOPK = 8
_WARMUP = 2
_TIMEOUT = 60.0


def measure(group: Any, tokens: int = 4096, hidden: int = 7168, iterations: int = 10) -> dict[str, Any]:
    """Time dispatches with increasing numbers of blocks. Collective.

    Parameters
    ----------
    group
        The ranks, in a form that `Buffer` takes; each has its own GPU as the current one.
    tokens
        Tokens per rank.
    hidden
        BF16 elements per row.
    iterations
        Timed dispatches with each number of blocks.

    Returns
    -------
    dict
        `points`: for each number of blocks, the `seconds` and `gb_per_s`, read and written; `rates`: a `Rates`;
        `max_blocks`; `linked`: whether there are several GPUs; `file`: where Buffers on such GPUs look for the rates.

    Raises
    ------
    ValueError
        So few bytes are moved that the startup time of a kernel hides them.
    """
    import deep_ep_py as deep_ep

    gather = make_bootstrap(group).all_gather
    row_bytes = hidden * torch.bfloat16.itemsize
    with deep_ep.Buffer(
        group,
        num_nvl_bytes=64 << 20,
        device="cuda",
        timeout=_TIMEOUT,
        # Two outputs of the maximum size: one is released only when the next exists.
        arena_bytes=(2 * tokens * group.size() * (row_bytes + 64)) + (64 << 20),
    ) as buffer:
        ranks, device = buffer.group_size, buffer._engine.device
        buffer.warmup(hidden, 1)
        alone, many = (_routes(buffer, count, hidden) for count in (1, tokens))
        moved = statistics.mean(gather((tokens + many[2]) * row_bytes))
        max_blocks = device.max_blocks
        counts = sorted({*(1 << i for i in range(max_blocks.bit_length())), max_blocks})
        linked = ranks > 1
        align = make_aligner(buffer, many[0][:1], deep_ep.Config(num_sms=1)) if linked else None
        startup = _seconds(buffer, gather, alone, 1, iterations, align)
        spent = [_seconds(buffer, gather, many, blocks, iterations, align) for blocks in counts]
    moving = [seconds - startup for seconds in spent]
    if min(moving) <= 0:
        raise ValueError(f"tokens={tokens}: expected more, because moving their rows takes no longer than moving one")
    return {
        "machine": describe_machine(),
        "boundary": BOUNDARY,
        "ranks": ranks,
        "tokens": tokens,
        "hidden": hidden,
        "moved_bytes": moved,
        "points": [
            {"blocks": blocks, "seconds": seconds, "gb_per_s": moved / seconds / 1e9}
            for blocks, seconds in zip(counts, spent)
        ],
        "rates": Rates(tuple((blocks, moved / seconds) for blocks, seconds in zip(counts, moving)), startup),
        "max_blocks": max_blocks,
        "linked": linked,
        "file": rates_file(_folder(), device.name, device.copies, linked),
    }


def _seconds(
    buffer: Any,
    gather: Callable[[Any], list[Any]],
    routes: tuple[torch.Tensor, Any, int],
    blocks: int,
    iterations: int,
    align: Callable[[], Any] | None,
) -> float:
    """Return the seconds of a dispatch, for the slowest rank; if there are several, they are aligned first."""
    import deep_ep_py as deep_ep

    x, handle, _ = routes
    dispatch = partial(buffer.dispatch, x, handle=handle, config=deep_ep.Config(num_sms=blocks))
    times = []
    for _ in range(_WARMUP + iterations):
        gather(None)
        _, milliseconds = EventTimer().time(dispatch, buffer.comm_stream, align)
        times.append(max(gather(milliseconds)) / 1e3)
    return statistics.median(times[_WARMUP:])


def _folder() -> Path:
    from deep_ep_py.device.jit.cache import default_folder

    return default_folder()


def _routes(buffer: Any, tokens: int, hidden: int) -> tuple[torch.Tensor, Any, int]:
    """Return rows, the handle of their dispatch to as many random ranks as a top-8 reaches, and how many arrived."""
    ranks = buffer.group_size
    wide = max(1, round(destinations(_TOPK, ranks)))
    random = torch.Generator().manual_seed(1 + buffer.rank)
    ids = torch.rand(tokens, ranks, generator=random).topk(wide).indices.to(buffer.device)
    x = torch.randn(tokens, hidden, generator=random).to(torch.bfloat16).to(buffer.device)
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, ranks)
    received, _, _, _, handle, _ = buffer.dispatch(
        x, num_tokens_per_rank=per_rank, is_token_in_rank=in_rank, num_tokens_per_expert=per_expert
    )
    return x, handle, received.shape[0]


def _where(report: dict[str, Any]) -> str:
    if not report["linked"]:
        return "1 rank on one GPU"
    return f"{report['ranks']} ranks on {report['ranks']} linked GPUs, a process and a GPU each"


def as_table(report: dict[str, Any]) -> Table:
    """Return the report as a table for people."""
    rates: Rates = report["rates"]
    table = Table(
        title=f"{_where(report)}, {report['moved_bytes'] / 1e6:.4g} MB each",
        caption=f"One block moves {rates.points[0][1] / 1e9:.3g} GB/s, all {rates.most / 1e9:.4g} GB/s; a call that "
        f"moves nothing takes {1e6 * rates.startup:.3g} us, which these rates leave out.",
        box=box.SIMPLE_HEAD,
        title_justify="left",
        caption_justify="left",
    )
    for column in ("blocks", "us", "GB/s"):
        table.add_column(column, justify="right")
    for point in report["points"]:
        table.add_row(str(point["blocks"]), *(f"{value:.4g}" for value in (1e6 * point["seconds"], point["gb_per_s"])))
    return table


@click.command(context_settings={"show_default": True, "help_option_names": ["-h", "--help"]})
@click.option("--tokens", type=click.IntRange(64, 65536), default=4096, help="Tokens per rank.")
@click.option("--hidden", type=click.IntRange(8), default=7168, help="BF16 elements per row, a multiple of 8.")
@click.option("--iterations", type=click.IntRange(1), default=10, help="Timed dispatches with each number of blocks.")
@click.option("--dry-run", is_flag=True, show_default=False, help="Do not save the rates.")
@click.option("--json", "json_file", type=OutputFile(), help="Also write a report here.")
def command(tokens: int, hidden: int, iterations: int, dry_run: bool, json_file: Path | None) -> None:
    """Measure and save the throughput of a kernel's blocks on this GPU, which sets the default number of blocks.

    By default this measures the GPU's memory. Under torchrun, with a GPU for each of several ranks, it measures the
    links between the GPUs.
    """
    if hidden % 8:
        raise click.BadParameter("a row must be a multiple of 16 bytes", param_hint="--hidden")
    try:
        require_gpu()
        report = _measure_here(tokens, hidden, iterations)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    if report is None:
        return
    console = Console()
    console.print(as_table(report))
    console.print(report["boundary"], style="dim")
    if not dry_run:
        report["rates"].save(report["file"])
        console.print(f"saved: {report['file']}")
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(as_json(report), indent=2) + "\n")
        console.print(f"report: {json_file}")


def as_json(report: dict[str, Any]) -> dict[str, Any]:
    """Return the report as plain values."""
    return {**report, "rates": asdict(report["rates"]), "file": report["file"].name}


def _measure_here(tokens: int, hidden: int, iterations: int) -> dict[str, Any] | None:
    """Return the report, or None on ranks other than the first."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        from deep_ep_py.testing import run_ranks

        reports: list[dict[str, Any]] = run_ranks(1, measure, tokens, hidden, iterations, device="cuda")
        return reports[0]
    if (there := machines()) > 1:
        raise ValueError(
            f"ranks on {there} machines: expected all on one, because the rates are those of the links inside it"
        )
    with gpu_per_rank() as group:
        report = measure(group, tokens, hidden, iterations)
        return report if group.rank() == 0 else None
