"""When the warps of each kernel end its stages: the stamps that kernels note with DEEP_EP_STAGES=on."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import click
import torch

from benchmarks.gpu_lab import probe, sizes
from deep_ep_py.base.choices import STAGES
from deep_ep_py.base.options import OutputFile
from deep_ep_py.testing import run_ranks
from deep_ep_py.tools.trace.merge import merge, read
from deep_ep_py.tools.trace.stages import stages_of

BOUNDARY = (
    "Microseconds by the GPU's clock, which advances in steps (the smallest one seen is given): from the first warp's "
    "begin to the last warp's end of a stage, and how long it took the slowest warp; medians over ranks and 10 calls, "
    "after 3 that do not count. All ranks share the GPU and begin together."
)
WARMUP, CALLS = 3, 10


def on_each_rank(group: Any, folder: Path) -> None:
    """Record calls of each kind."""
    import deep_ep_py as deep_ep

    few, many = sizes.LOW_LATENCY_TOKENS, sizes.NORMAL_TOKENS
    hint = deep_ep.Buffer.get_low_latency_rdma_size_hint
    size = hint(few, sizes.HIDDEN, sizes.RANKS, sizes.EXPERTS, num_topk=sizes.TOPK)
    room = deep_ep.Buffer.get_dispatch_config(sizes.RANKS).get_nvl_buffer_size_hint(2 * sizes.HIDDEN, sizes.RANKS)
    with deep_ep.Buffer(group, room, size, low_latency_mode=True, device="cuda") as buffer:
        random = torch.Generator().manual_seed(1 + group.rank())
        x = torch.randn(many, sizes.HIDDEN, generator=random).bfloat16().to(buffer.device)
        topk_weights, topk_idx = torch.rand(many, sizes.EXPERTS, generator=random).topk(sizes.TOPK)
        topk_weights, topk_idx = topk_weights.to(buffer.device), topk_idx.to(buffer.device)

        def low_latency(tokens: int) -> None:
            rows, ids, weights = x[:tokens], topk_idx[:tokens], topk_weights[:tokens]
            packed, _, handle, _, _ = buffer.low_latency_dispatch(rows, ids, few, sizes.EXPERTS, use_fp8=True)
            results = torch.empty(packed[0].shape, dtype=torch.bfloat16, device=buffer.device)
            buffer.low_latency_combine(results, ids, weights, handle)

        def normal() -> None:
            per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, sizes.EXPERTS)
            rows, _, _, _, handle, _ = buffer.dispatch(
                x,
                topk_idx=topk_idx,
                topk_weights=topk_weights,
                num_tokens_per_rank=per_rank,
                is_token_in_rank=in_rank,
                num_tokens_per_expert=per_expert,
            )
            buffer.combine(rows, handle)

        for name, call in (
            (f"low-latency, {few} tokens", lambda: low_latency(few)),
            ("low-latency, 1 token", lambda: low_latency(1)),
            (f"normal, {many} tokens", normal),
        ):
            for _ in range(WARMUP):
                call()
            group.barrier()
            with buffer.trace(folder / f"{name}.json"):
                for _ in range(CALLS):
                    call()
            group.barrier()


def tables_of(folder: Path) -> list[dict[str, Any]]:
    """Return a table per kind of call."""
    found = []
    names = sorted({path.name.rpartition(".rank")[0] for path in folder.glob("*.rank*.json")})
    for name in names:
        merged = merge([read(path) for path in sorted(folder.glob(f"{name}.rank*.json"))])
        rows = [[one.kernel, one.name, one.end, one.duration] for one in stages_of(merged["traceEvents"])]
        found.append(probe.table(name, ["kernel", "stage", "last end, us", "slowest warp, us"], rows))
    return found


def smallest_step(folder: Path) -> float:
    """Return the smallest difference of two times, in microseconds."""
    (path, *_) = folder.glob("normal*.rank0.json")
    times = {entry["ts"] for entry in read(path)["traceEvents"] if entry.get("cat") == "stage"}
    ordered = sorted(times)
    return min((after - before for before, after in zip(ordered, ordered[1:], strict=False)), default=0.0)


@click.command()
@click.option("--json", "json_file", type=OutputFile(), help="Write the figures here.")
def main(json_file: Path | None) -> None:
    """Record the stages of all calls."""
    os.environ[STAGES] = "on"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run_ranks(sizes.RANKS, lambda group: on_each_rank(group, folder), device="cuda")
        probe.write_figures(json_file, BOUNDARY, tables_of(folder), clock_step_us=smallest_step(folder))


if __name__ == "__main__":
    main()
