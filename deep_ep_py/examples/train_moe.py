"""Train a MoE language model whose experts are distributed over ranks, and check it against one process.

    python -m deep_ep_py.examples.train_moe
    torchrun --nproc-per-node 4 -m deep_ep_py.examples.train_moe

The training text is this repository, byte by byte. Outside the experts, the ranks are data parallel: each has its own
sequences and the same weights, and gradients are summed. Inside, each holds its own experts, and `deep_ep_py.ops` sends
rows to them and back. Then one process trains the same model with all experts on the same batches: the losses must
agree, and fall.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
from torch import Tensor, nn

from deep_ep_py.base.options import PICTURES, OutputFile
from deep_ep_py.examples.text import read_repository
from deep_ep_py.examples.train_model import Batches, ByteModel, OneProcessMoE, TrainConfig
from deep_ep_py.examples.train_report import plot_training, print_training, print_verdict, verdict
from deep_ep_py.moe import Gate, MoELayer
from deep_ep_py.tools.bench.launch import launch, torchrun_rank
from deep_ep_py.tools.bench.processes import RankFailed
from deep_ep_py.tools.bench.progress import BenchProgress, make_console
from deep_ep_py.tools.bench.rank_job import RankContext

_BF16_BYTES = 2
_EPS, _SLOW_STEPS = 1e-3, 20
Emit = Callable[[dict[str, Any]], None]


def run_rank(context: RankContext, config: TrainConfig, text: bytes, check: bool) -> dict[str, Any] | None:
    """Run one rank's part of the training. Returns the losses and times on rank 0."""
    import deep_ep_py as deep_ep
    from deep_ep_py import ops

    # One Buffer serves all layers. Ops find it by the name under which it is registered.
    row_bytes = config.hidden * _BF16_BYTES
    size_hint = deep_ep.Buffer.get_dispatch_config(config.ranks).get_nvl_buffer_size_hint(row_bytes, config.ranks)
    with deep_ep.Buffer(context.group, num_nvl_bytes=size_hint) as buffer:
        group = ops.register(buffer)

        def make_layer(layer: int, gate: Gate) -> nn.Module:
            return MoELayer(gate, config.make_experts(layer, context.rank), config.experts, group)

        model = ByteModel(config, make_layer)
        shared = [weight for name, weight in model.named_parameters() if ".experts." not in name]
        batches = Batches(text, config)

        def loss_of_step(step: int) -> Tensor:
            # The mean over the bytes of all ranks. Experts receive the gradients of all ranks' rows through their
            # dispatch.
            loss = model(batches.of_step(step, context.rank)) / config.ranks
            loss.backward()
            _sum_over_ranks(shared, context)
            mean = loss.detach()
            dist.all_reduce(mean, group=context.group)
            return mean

        label = f"{config.ranks} ranks, {config.local_experts} of {config.experts} experts each"
        losses, milliseconds = _train(model, loss_of_step, config, context.emit, label)
        operations = buffer.stats()["operations"]
    if context.rank != 0:
        return None
    figures = {"losses": losses, "milliseconds": milliseconds, "operations": operations}
    if check:
        figures["reference"], figures["reference_milliseconds"] = _train_in_one_process(config, batches, context.emit)
    return figures


def _sum_over_ranks(weights: list[nn.Parameter], context: RankContext) -> None:
    """Sum the gradients of the weights that every rank has."""
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    together = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(together, group=context.group)
    for gradient, total in zip(gradients, together.split([gradient.numel() for gradient in gradients])):
        gradient.copy_(total.view_as(gradient))


def _train(
    model: nn.Module, loss_of_step: Callable[[int], Tensor], config: TrainConfig, emit: Emit, label: str
) -> tuple[list[float], list[float]]:
    """Return the loss of each step in nats per byte, and its duration in ms."""
    # Training amplifies rounding errors of sums. A large eps and a slow start keep two runs with different orders of
    # summation together.
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.rate, eps=_EPS)
    slow_start = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / _SLOW_STEPS))
    emit({"kind": "size", "label": label, "steps": config.steps})
    losses, milliseconds = [], []
    for step in range(config.steps):
        began = time.perf_counter()
        optimizer.zero_grad()
        losses.append(float(loss_of_step(step)))
        optimizer.step()
        slow_start.step()
        milliseconds.append((time.perf_counter() - began) * 1e3)
        emit({"kind": "step", "step": step, "note": f"loss {losses[-1]:.3f}"})
    return losses, milliseconds


def _train_in_one_process(config: TrainConfig, batches: Batches, emit: Emit) -> tuple[list[float], list[float]]:
    def make_layer(layer: int, gate: Gate) -> nn.Module:
        return OneProcessMoE(gate, [config.make_experts(layer, rank) for rank in range(config.ranks)])

    model = ByteModel(config, make_layer)

    def loss_of_step(step: int) -> Tensor:
        loss = model(batches.of_step(step))
        loss.backward()
        return loss.detach()

    return _train(model, loss_of_step, config, emit, f"one process, {config.experts} experts")


def _check_options(config: TrainConfig) -> None:
    for name, value, divisor, what in (
        ("--experts", config.experts, config.ranks, f"--ranks ({config.ranks})"),
        ("--hidden", config.hidden, config.heads, f"--heads ({config.heads})"),
        ("--hidden", config.hidden, 8, "8, for rows of 16-byte units"),
    ):
        if value % divisor:
            raise click.UsageError(f"{name} is {value}; expected a multiple of {what}")
    if config.topk > config.experts:
        raise click.UsageError(f"--topk is {config.topk}; expected at most --experts ({config.experts})")


@click.command(context_settings={"show_default": True, "help_option_names": ["-h", "--help"]})
@click.option(
    "--ranks",
    type=click.IntRange(1, 64),
    default=4,
    envvar="WORLD_SIZE",
    help="Number of processes; under torchrun, the number that it started.",
)
@click.option("--steps", type=click.IntRange(1), default=100, help="Optimizer steps.")
@click.option("--batch", type=click.IntRange(1), default=8, help="Sequences per rank and step.")
@click.option("--length", type=click.IntRange(1), default=64, help="Bytes per sequence.")
@click.option("--hidden", type=click.IntRange(8), default=64, help="Elements per row.")
@click.option("--layers", type=click.IntRange(1), default=2, help="Blocks of attention and experts.")
@click.option("--heads", type=click.IntRange(1), default=4, help="Attention heads.")
@click.option("--experts", type=click.IntRange(1), default=16, help="Experts per layer, on all ranks together.")
@click.option("--topk", type=click.IntRange(1, 32), default=4, help="Experts per token.")
@click.option("--intermediate", type=click.IntRange(1), default=64, help="Width of an expert's MLP.")
@click.option("--rate", type=click.FloatRange(0, min_open=True), default=2e-3, help="Learning rate of AdamW.")
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, help="Of weights and data.")
@click.option("--check/--no-check", default=True, help="Also train in one process and compare the losses.")
@click.option("--plot", type=OutputFile(*PICTURES), default=Path("out/train_moe.png"), help="File for the picture.")
def main(check: bool, plot: Path, **options: Any) -> None:
    """Train a small expert-parallel MoE language model on the text of this repository.

    Exits with 1 if the losses do not fall, or differ from those of one process that holds all experts.
    """
    config = TrainConfig(**options)
    _check_options(config)
    text, origin = read_repository()
    console = make_console(quiet=torchrun_rank() != 0)
    then = ", then in one process that has all experts, to compare the losses" if check else ""
    console.print(
        f"A MoE language model is trained for {config.steps} steps on {config.ranks} ranks, processes with "
        f"{config.local_experts} of {config.experts} experts each{then}. Its text: {origin}, {len(text) / 1e6:.1f} MB, "
        f"of which each rank reads {config.batch * config.length} bytes in a step."
    )
    try:
        with BenchProgress(console) as progress:
            figures = launch(run_rank, config.ranks, (config, text, check), progress.on_event)
    except RankFailed as error:
        raise click.ClickException(str(error)) from error
    if figures is None:
        return
    print_training(figures, config, console)
    plot_training(figures, config, plot, console)
    print_verdict(verdict(figures), config, console)
    if not verdict(figures).passed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
