"""How much slower combine would be with one line changed: before a piece of its ring in shared memory is overwritten, a
fence of all memory instead of one of shared memory alone.

The change is applied to a copy of the sources. A process with each runs combine by turns.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click

from benchmarks.gpu_lab import sizes
from benchmarks.gpu_lab.experiments import PYTHON, ROOT

HEADER = Path("csrc/device/cuda/row_sums_bulk.h")
BEFORE = "bulk::fence_shared();  // the piece just read is overwritten through the other proxy"
AFTER = 'asm volatile("fence.proxy.async;" ::: "memory");  // it orders all memory'
BOUNDARY = (
    "Combine of the received tensor in normal mode, by 8 ranks with 16 blocks each that share the GPU: all of the call "
    "by events, from the first rank's start to the last rank's end; and its kernel alone, the slowest rank's. A "
    "process with the sources as they are and one with the change wait for their turns; a turn is 5 calls for each "
    "figure. ratio: the median of the turns' ratios, without over with the change; below 1 the change is slower, as it "
    "should be."
)
KERNEL = "combine"
_CALLS = 5
_LAST_SECONDS = 1.5


def patch(text: str) -> str:
    """Return the header with the change; the line that is replaced must be there once."""
    if text.count(BEFORE) != 1:
        raise ValueError(f"{HEADER}: expected once: {BEFORE}")
    return text.replace(BEFORE, AFTER)


def patched_copy(folder: Path) -> None:
    """Copy what an interpreter needs of the library, built, and change it."""
    for name in ("csrc", "deep_ep_py"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    header = folder / HEADER
    header.write_text(patch(header.read_text()))


def serve(group: Any) -> None:
    """On each rank: prepare, then time combines whenever rank 0 reads a line, until it reads none."""
    import torch

    import deep_ep_py as deep_ep
    from deep_ep_py.tools.bench import gpu_timing
    from deep_ep_py.tools.bench.kernel_times import KernelTimes
    from deep_ep_py.transport.bootstrap.groups import make_bootstrap

    ranks = make_bootstrap(group)
    tokens, hidden = sizes.NORMAL_TOKENS, sizes.HIDDEN
    room = deep_ep.Buffer.get_dispatch_config(ranks.size).get_nvl_buffer_size_hint(2 * hidden, ranks.size)
    arena = 2 * ranks.size * tokens * 2 * hidden + (64 << 20)
    with deep_ep.Buffer(group, num_nvl_bytes=room, device="cuda", arena_bytes=arena) as buffer:
        buffer.warmup(hidden, sizes.TOPK)
        random = torch.Generator(device=buffer.device).manual_seed(1 + ranks.rank)
        given = {"generator": random, "device": buffer.device}
        x = torch.randn(tokens, hidden, **given).bfloat16()
        topk_idx = torch.rand(tokens, sizes.EXPERTS, **given).topk(sizes.TOPK).indices
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, sizes.EXPERTS)
        rows, _, _, _, handle, _ = buffer.dispatch(
            x, num_tokens_per_rank=per_rank, is_token_in_rank=in_rank, num_tokens_per_expert=per_expert
        )
        config = deep_ep.Config(num_sms=min(sizes.NORMAL_BLOCKS, buffer._engine.device.max_blocks))

        def combine() -> torch.Tensor:
            return buffer.combine(rows, handle, config=config)[0]

        combined, calls, number = combine(), gpu_timing.GpuTimer(ranks), 0
        while ranks.all_gather(sys.stdin.readline() if ranks.rank == 0 else None)[0]:
            number, kernels = number + 1, KernelTimes(buffer, ranks)
            calls.recording = True
            for _ in range(_CALLS):
                combined = calls.time(f"turn {number}", combine)
            calls.recording = False
            for _ in range(_CALLS):
                calls.time("kernels", kernels.observe(combine))
                kernels.keep("combine")
            kernel_ms = kernels.series()["combine"][KERNEL]["ms"]["median"]
            call_ms = statistics.median(calls.series()[f"turn {number}"])
            bits = ranks.all_gather(int(combined.view(torch.int16).long().sum().cpu()))
            if ranks.rank == 0:
                print(json.dumps({"call_ms": call_ms, "kernel_ms": kernel_ms, "bits": bits}), flush=True)


def start_server(folder: Path) -> Any:
    """Start a process that imports the library from a folder and serves."""
    paths = os.pathsep.join([str(folder), str(ROOT)])
    return subprocess.Popen(
        [PYTHON, "-m", "benchmarks.gpu_lab.combine_fence", "--serve"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": paths},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def turn(server: Any) -> dict[str, Any]:
    """Let a server time combine once."""
    server.stdin.write("\n")
    server.stdin.flush()
    found: dict[str, Any] = json.loads(server.stdout.readline() or "null")
    if found is None:
        raise RuntimeError("a process that combines has ended")
    return found


def measure(until: float) -> dict[str, Any]:
    """Run both by turns for as long as there is time, at least once."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        patched_copy(folder)
        servers = [start_server(ROOT), start_server(folder)]
        try:
            for server in servers:
                turn(server)  # the first one does not count
            turns: list[list[dict[str, Any]]] = []
            while not turns or time.monotonic() < until:
                pair = [turn(server) for server in (servers if len(turns) % 2 else reversed(servers))]
                turns.append(pair if len(turns) % 2 else pair[::-1])
        finally:
            for server in servers:
                server.stdin.close()
            for server in servers:
                server.wait()
    return as_figures(turns)


def as_figures(turns: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Return the report of pairs: without the change, and with it."""
    rows = []
    for name, key in (("call", "call_ms"), ("kernel", "kernel_ms")):
        ratios = [without[key] / changed[key] for without, changed in turns]
        medians = [statistics.median(pair[which][key] for pair in turns) for which in (0, 1)]
        rows.append([name, *medians, statistics.median(ratios), f"{min(ratios):.3f} to {max(ratios):.3f}", len(turns)])
    same = all(without["bits"] == changed["bits"] for without, changed in turns)
    columns = ["figure", "ms without", "ms with the change", "ratio", "range", "turns"]
    table = {
        "title": f"Combine; its results are {'the same' if same else 'NOT the same'}",
        "columns": columns,
        "rows": rows,
    }
    return {"boundary": BOUNDARY, "tables": [table], "same_bits": same}


@click.command()
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write the figures here.")
@click.option("--seconds", type=float, default=30.0, show_default=True, help="Time for all of it.")
@click.option("--serve", "serves", is_flag=True, hidden=True)
def main(json_file: Path | None, seconds: float, serves: bool) -> None:
    """Run combine with and without the change by turns."""
    began = time.monotonic()
    if serves:
        from deep_ep_py.testing import run_ranks

        run_ranks(sizes.RANKS, serve, device="cuda")
        return
    figures = measure(began + seconds - _LAST_SECONDS)
    for row in figures["tables"][0]["rows"]:
        print(*row)
    if json_file is not None:
        json_file.write_text(json.dumps(figures, indent=2) + "\n")
    if not figures["same_bits"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
