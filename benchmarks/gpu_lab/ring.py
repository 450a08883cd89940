"""How fast blocks copy by bulk copies, by the loads that each warp keeps ahead of its stores."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import click
import torch

from benchmarks.gpu_lab import probe
from deep_ep_py.base.native import C
from deep_ep_py.base.options import OutputFile
from deep_ep_py.device.jit import copy_piece

BOUNDARY = (
    "Bytes read plus bytes written per second, by events around one copy of memory that no cache holds, by blocks of "
    "16 warps, each of which passes pieces of 2 KiB through a ring in shared memory; the median of 9. In brackets: the "
    "ratio to a copy by the driver in this run."
)
BLOCKS, AHEAD = (1, 8, 16, 24, 48), (1, 2, 3, 4)
PIECE_BYTES, BARRIER_BYTES, WARPS = 2048, 128, 16
TIMES = 9


@click.command()
@click.option("--json", "json_file", type=OutputFile(), help="Write the figures here.")
def main(json_file: Path | None) -> None:
    """Time copies through rings of several sizes, on several numbers of blocks."""
    device = probe.gpu()
    context = C.cuda.Context(device.index or 0)
    size = probe.large_bytes()
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    launcher, gate = C.cuda.Launcher(context, cooperative=False), probe.Gate()
    stream, current = torch.cuda.ExternalStream(launcher.stream), torch.cuda.current_stream()
    copied = 2 * size / probe.median_of(TIMES, lambda: gate.time([current], lambda: target.copy_(source))) / 1e6
    rows, pieces, room = [], size // PIECE_BYTES, launcher.max_shared_bytes
    for ahead in AHEAD if copy_piece(context.architecture) else ():  # other GPUs have no bulk copies
        shared = WARPS * ((ahead + 1) * PIECE_BYTES + BARRIER_BYTES)
        if shared > room:
            break
        code = probe.compiled("ring.cu", f"gpu_lab::ring<{ahead}>", context)
        kernel = probe.BareKernel(context, code, shared)
        row: list[int | str] = [ahead]
        for blocks in BLOCKS:
            arguments = probe.words(source.data_ptr(), target.data_ptr(), pieces)
            threads = WARPS * probe.WARP_THREADS
            launch = partial(kernel.launch, launcher.stream, blocks, threads, arguments, shared)
            milliseconds = probe.median_of(TIMES, lambda launch=launch: gate.time([stream], launch))
            rate = 2 * pieces * PIECE_BYTES / milliseconds / 1e6
            row.append(f"{rate:.0f} ({rate / copied:.2f})")
        rows.append(row)
    columns = ["loads ahead", *(f"{blocks} blocks" for blocks in BLOCKS)]
    probe.write_figures(json_file, BOUNDARY, [probe.table("Copies through rings, GB/s", columns, rows)])


if __name__ == "__main__":
    main()
