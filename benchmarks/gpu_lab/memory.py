"""How fast this GPU's memory is: filled, copied, and written more than it is read, as by a dispatch."""

from __future__ import annotations

from pathlib import Path

import click
import torch

from benchmarks.gpu_lab import probe
from deep_ep_py.base.native import C
from deep_ep_py.base.options import OutputFile

BOUNDARY = (
    "Bytes read plus bytes written per second, by events around one operation on memory that no cache holds; the "
    "median of 9. Beside each figure stands its ratio to the copy of this run. The third is a kernel that reads 3 "
    "pieces of 16 bytes and writes 16, which is about the proportion of a dispatch with top-8 on 8 ranks."
)
TIMES = 9
_LARGEST = 6  # copies of a piece


@click.command()
@click.option("--json", "json_file", type=OutputFile(), help="Write the figures here.")
def main(json_file: Path | None) -> None:
    """Time a fill, a copy and a spread."""
    device = probe.gpu()
    context = C.cuda.Context(device.index or 0)
    size = probe.large_bytes()
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    kernel = probe.BareKernel(context, probe.compiled("memory.cu", "gpu_lab::spread", context))
    launcher = C.cuda.Launcher(context, cooperative=False)
    stream, current = torch.cuda.ExternalStream(launcher.stream), torch.cuda.current_stream()
    pieces = size // _LARGEST // 16
    arguments = probe.words(source.data_ptr(), target.data_ptr(), pieces)
    blocks, gate = 2 * context.multiprocessors, probe.Gate()

    def spread() -> None:
        kernel.launch(launcher.stream, blocks, 512, arguments)

    measured = [
        ("fill", size, probe.median_of(TIMES, lambda: gate.time([current], target.zero_))),
        ("copy", 2 * size, probe.median_of(TIMES, lambda: gate.time([current], lambda: target.copy_(source)))),
        (
            "3 read, 16 written",
            pieces * 16 * (3 + 16) // 3,
            probe.median_of(TIMES, lambda: gate.time([stream], spread)),
        ),
    ]
    rates = {name: moved / milliseconds / 1e6 for name, moved, milliseconds in measured}
    rows = [[name, rate, rate / rates["copy"]] for name, rate in rates.items()]
    columns = ["operation", "GB/s", "of the copy"]
    probe.write_figures(json_file, BOUNDARY, [probe.table("Memory", columns, rows)])


if __name__ == "__main__":
    main()
