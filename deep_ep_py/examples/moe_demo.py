"""Dispatch and combine a MoE layer's tokens: checked, timed, plotted.

    python -m deep_ep_py.examples.moe_demo

This starts 8 ranks as processes on this machine. Each takes a part of a real text as its tokens, and a share of 256
experts; together they run an expert-parallel layer (`moe_layer.py`). Its output is compared with the same layer
computed in one process. The demo also runs under torchrun.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist

from deep_ep_py.base.options import PICTURES, OutputFile
from deep_ep_py.examples.demo_check import compare, reference
from deep_ep_py.examples.demo_config import DemoConfig
from deep_ep_py.examples.demo_report import plot_demo, print_demo, print_verdict
from deep_ep_py.examples.moe_layer import ExpertParallelMoE, Gate
from deep_ep_py.examples.text import embed_bytes, read_text
from deep_ep_py.moe import Experts
from deep_ep_py.tools.bench.launch import launch, torchrun_rank
from deep_ep_py.tools.bench.processes import RankFailed
from deep_ep_py.tools.bench.progress import BenchProgress, make_console
from deep_ep_py.tools.bench.rank_job import RankContext
from deep_ep_py.tools.bench.routing import require_groups
from deep_ep_py.tools.bench.timing import Stopwatch


@torch.no_grad()
def run_rank(context: RankContext, config: DemoConfig, text: bytes) -> dict[str, Any] | None:
    """Run one rank's part of the demo. Returns the figures on rank 0."""
    import deep_ep_py as deep_ep

    # One Buffer serves all layers of a model. Its size depends on the size of a row and the number of ranks.
    size_hint = deep_ep.Buffer.get_dispatch_config(config.ranks).get_nvl_buffer_size_hint(
        config.row_bytes, config.ranks
    )
    buffer = deep_ep.Buffer(context.group, num_nvl_bytes=size_hint)

    local_experts = config.experts // config.ranks
    gate = Gate(config.hidden, config.experts, config.topk, seed=config.seed)
    experts = Experts(context.rank * local_experts, local_experts, config.hidden, config.intermediate, config.seed)
    layer = ExpertParallelMoE(buffer, gate, experts, config.experts)
    x = embed_bytes(text, context.rank, config.tokens, config.hidden, config.seed)

    stopwatch = Stopwatch(context.group)
    context.emit({"kind": "size", "label": "running the layer", "steps": config.warmup + config.steps})
    for step in range(config.warmup + config.steps):
        stopwatch.recording = step >= config.warmup
        out = layer.forward(x, phase=stopwatch.time)
        context.emit({"kind": "step", "step": step})

    context.emit({"kind": "size", "label": "computing the same layer in one process", "steps": None})
    outputs = _gather(out, context)
    rows = _gather(torch.tensor([layer.rows_sent, layer.rows_received]), context)
    phases = stopwatch.series()
    buffer.destroy()
    if context.rank != 0:
        return None
    tokens_of_ranks = [
        embed_bytes(text, rank, config.tokens, config.hidden, config.seed) for rank in range(config.ranks)
    ]
    exact, magnitude = reference(tokens_of_ranks, gate, config.experts, config.intermediate, config.seed)
    return {
        "check": compare(torch.cat(outputs), exact, magnitude),
        "phases": phases,
        "rows": torch.stack(rows).tolist(),
    }


def _gather(tensor: torch.Tensor, context: RankContext) -> list[torch.Tensor]:
    """Gather every rank's tensor on rank 0."""
    gathered = [torch.empty_like(tensor) for _ in range(context.ranks)] if context.rank == 0 else None
    dist.gather(tensor, gathered, dst=0, group=context.group)
    return gathered or []


@click.command(context_settings={"show_default": True, "help_option_names": ["-h", "--help"]})
@click.option("--ranks", type=click.IntRange(1, 64), default=8, help="Number of processes.")
@click.option("--tokens", type=click.IntRange(1), default=512, help="Tokens per rank.")
@click.option("--hidden", type=click.IntRange(8), default=1024, help="Elements per row.")
@click.option("--intermediate", type=click.IntRange(1), default=128, help="Width of an expert's MLP.")
@click.option("--experts", type=click.IntRange(8), default=256, help="Total number of experts, in 8 groups.")
@click.option("--topk", type=click.IntRange(1, 32), default=8, help="Experts per token.")
@click.option("--steps", type=click.IntRange(1), default=10, help="Timed runs of the layer.")
@click.option("--warmup", type=click.IntRange(0), default=2, help="Untimed runs before them.")
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, help="Of weights and tokens.")
@click.option("--plot", type=OutputFile(*PICTURES), default=Path("out/moe_demo.png"), help="File for the picture.")
def main(plot: Path, **options: Any) -> None:
    """Run a MoE layer over several ranks: checked, timed, plotted."""
    config = DemoConfig(**options)
    if config.experts % config.ranks:
        raise click.UsageError(f"--experts is {config.experts}; expected a multiple of --ranks ({config.ranks})")
    if config.hidden % 8:
        raise click.UsageError(f"--hidden is {config.hidden}; expected a multiple of 8, for rows of 16-byte units")
    try:
        require_groups(config.experts, config.topk)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    text, origin = read_text()
    console = make_console(quiet=torchrun_rank() != 0)
    console.print(
        f"A MoE layer runs on {config.ranks} ranks, processes on this machine: {config.sizes}. Its tokens are bytes of "
        f"{origin}. The output is then compared with that of one process."
    )
    try:
        with BenchProgress(console) as progress:
            figures = launch(run_rank, config.ranks, (config, text), progress.on_event)
    except RankFailed as error:
        raise click.ClickException(str(error)) from error
    if figures is None:
        return
    print_demo(figures, config, console)
    plot_demo(figures, config, plot, console)
    print_verdict(figures["check"], config, console)
    if not figures["check"].passed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
