"""How much longer a low-latency dispatch takes whose code is no longer in the caches of instructions."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import click
import torch

from benchmarks.gpu_lab import probe, sizes
from deep_ep_py.base.options import OutputFile
from deep_ep_py.testing import run_ranks

BOUNDARY = (
    "Microseconds of the kernel of a low-latency dispatch of one rank alone, which waits for no other, by events "
    "around its launch; the median of 20. Before it on the same stream runs the same kernel, an empty one, or one "
    "whose code of 288 KB displaces the dispatch's from the caches of instructions; each of the latter two with a "
    "block on every multiprocessor."
)
TIMES = 20
_THREADS = 512
BEFORE = ("the same kernel", "an empty kernel", "a kernel of 288 KB of code")


def on_the_rank(group: Any) -> list[float]:
    """Return the medians, in microseconds."""
    import deep_ep_py as deep_ep

    tokens, hidden, topk, experts = sizes.LOW_LATENCY_TOKENS, sizes.HIDDEN, sizes.TOPK, sizes.EXPERTS // sizes.RANKS
    size = deep_ep.Buffer.get_low_latency_rdma_size_hint(tokens, hidden, 1, experts, num_topk=topk)
    with deep_ep.Buffer(group, 0, size, low_latency_mode=True, device="cuda") as buffer:
        device = buffer._engine.device
        random = torch.Generator().manual_seed(1)
        x = torch.randn(tokens, hidden, generator=random).bfloat16().to(buffer.device)
        topk_idx = torch.rand(tokens, experts, generator=random).topk(topk).indices.to(buffer.device)
        empty, cold = (
            probe.BareKernel(device.context, probe.compiled(f"{name}.cu", f"gpu_lab::{name}", device.context))
            for name in ("empty", "cold_code")
        )
        results = probe.Results(device.context, 1)
        arguments, stream = probe.words(results.address, 1), torch.cuda.current_stream().cuda_stream
        blocks = device.context.multiprocessors

        def dispatch() -> None:
            buffer.low_latency_dispatch(x, topk_idx, tokens, experts, use_fp8=True)

        def empty_first() -> None:
            empty.launch(stream, blocks, _THREADS, probe.words(0))

        def cold_first() -> None:
            cold.launch(stream, blocks, _THREADS, arguments)

        found: list[list[float]] = [[] for _ in BEFORE]
        for _ in range(1 + TIMES):
            for samples, before in zip(found, (dispatch, empty_first, cold_first), strict=True):
                before()
                device.time_launches(True)
                dispatch()
                device.time_launches(False)
                ((_, begin, end),) = device.take_launch_times()
                samples.append(1e3 * (end - begin))
        return [statistics.median(samples[1:]) for samples in found]


@click.command()
@click.option("--json", "json_file", type=OutputFile(), help="Write the figures here.")
def main(json_file: Path | None) -> None:
    """Time a dispatch after other kernels."""
    found = run_ranks(1, on_the_rank, device="cuda")[0]
    rows = [[before, microseconds, microseconds / found[0]] for before, microseconds in zip(BEFORE, found, strict=True)]
    title = f"Low-latency dispatch of {sizes.LOW_LATENCY_TOKENS} tokens"
    probe.write_figures(json_file, BOUNDARY, [probe.table(title, ["after", "us", "ratio"], rows)])


if __name__ == "__main__":
    main()
