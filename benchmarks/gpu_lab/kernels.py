"""Compiles the benchmarks' kernels for this GPU, on all cores: one after the other, as a benchmark would at its first
call, they would take most of its time.
"""

from __future__ import annotations

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click

from benchmarks.gpu_lab import probe, sizes
from deep_ep_py.core.native import C
from deep_ep_py.core.options import OutputFile
from deep_ep_py.device.cuda import bulk_copies
from deep_ep_py.jit import KERNELS, Kernel, KernelCache, Shape

ROW_BYTES = 2 * sizes.HIDDEN
BOTH_MODES = ("notify", "dispatch", "notify_cached", "combine", "low_latency_dispatch", "low_latency_combine")


def wanted(ranks: int, bulk: bool) -> list[tuple[Kernel, Shape]]:
    """Return the kernels, with the shapes for which the benchmarks take them; the largest first."""
    names = {(ROW_BYTES, sizes.TOPK): BOTH_MODES, (ROW_BYTES, 0): ("dispatch", "combine"), (0, sizes.TOPK): ("layout",)}
    return [
        (KERNELS[name], Shape(ranks, row_bytes, topk, bulk_copies=bulk))
        for (row_bytes, topk), those in names.items()
        for name in those
    ]


@click.command()
@click.option(
    "--ranks", type=click.IntRange(1), default=sizes.RANKS, show_default=True, help="Ranks of the benchmarks."
)
@click.option("--json", "json_file", type=OutputFile(), help="Write the figures here.")
def main(ranks: int, json_file: Path | None) -> None:
    """Fill the cache of kernels."""
    architecture = C.cuda.Context(probe.gpu().index or 0).architecture
    cache, bulk = KernelCache(), bulk_copies(architecture)

    def seconds_of(one: tuple[Kernel, Shape]) -> tuple[str, float]:
        began = time.monotonic()
        kernel, shape = one
        cache.get_all([kernel], shape, architecture, 0)
        return f"{kernel.name}, rows of {shape.row_bytes} bytes, top-{shape.topk}", time.monotonic() - began

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        rows = [list(one) for one in pool.map(seconds_of, wanted(ranks, bulk))]
    table = probe.table(f"Kernels for {architecture}", ["kernel", "seconds until it was there"], rows)
    print(json.dumps(rows))
    if json_file is not None:
        json_file.write_text(json.dumps({"tables": [table]}, indent=2) + "\n")


if __name__ == "__main__":
    main()
