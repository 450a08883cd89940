"""What single operations cost on this GPU: fences, atomics, loads, bulk loads, and launches of an empty kernel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import torch

from benchmarks.gpu_lab import probe
from deep_ep_py.base.native import C
from deep_ep_py.base.options import OutputFile
from deep_ep_py.device.jit import copy_piece

BOUNDARY = (
    "Cycles of the SM's clock that a thread of the first block waits for an operation, the mean of 64; the work of "
    "reading the clock is inside and has a row of its own. Under load, a copy of large tensors fills the memory "
    "meanwhile. Launches: microseconds from one to the next, of 20 queued behind a gate, by events around all of them; "
    "the median of 9."
)
FENCES = {
    "nothing": "NoFence",
    "fence.proxy.async": "FenceProxy",
    "fence.proxy.async.shared::cta": "FenceProxyShared",
    "fence.proxy.async.global": "FenceProxyGlobal",
    "fence.acq_rel.gpu": "FenceGpu",
    "fence.acq_rel.sys": "FenceSystem",
}
ADDITIONS = {"atom, generic address": "AtomOnGenericAddress", "red, global address": "RedOnGlobalAddress"}
# Blocks, warps of each, and stores of a lane before each fence.
SHAPES = ((1, 1, 0), (1, 1, 2), (16, 16, 0), (16, 16, 2), (100, 16, 2))
BULK_BYTES = (512, 1024, 2048, 14336)
STRIDE = 1 << 20
LAUNCHES, TIMES = 20, 9
_COPIES = 60  # keep the memory busy for longer than any kernel here takes


class Bench:
    """The GPU, memory for the operations, and a load for it."""

    def __init__(self) -> None:
        device = probe.gpu()
        self.context = C.cuda.Context(device.index or 0)
        self.launcher = C.cuda.Launcher(self.context, cooperative=False)
        self.spread = probe.large_bytes()
        self.memory = torch.zeros(self.spread + (16 << 20), dtype=torch.uint8, device=device)
        self.source = torch.empty(self.spread, dtype=torch.uint8, device=device)
        self.target = torch.empty_like(self.source)
        self.cycles = probe.Results(self.context, 2)

    def run(
        self, expression: str, blocks: int, warps: int, amount: int, shared: int = 0, load: bool = False
    ) -> list[int]:
        """Run a kernel of fences.cu, and return the words that it has written."""
        name = f"gpu_lab::{expression}"
        if not self.launcher.loaded(name, probe.NO_SHAPE):
            code = probe.compiled("fences.cu", name, self.context)
            self.launcher.load(name, probe.NO_SHAPE, code.cubin, code.symbol)
        self.cycles.clear()
        torch.cuda.synchronize()
        for _ in range(_COPIES if load else 0):
            self.target.copy_(self.source)
        arguments = probe.words(self.cycles.address, self.memory.data_ptr(), amount, self.spread)
        self.launcher.wait(self.launcher.launch(name, probe.NO_SHAPE, blocks, warps, shared, arguments))
        torch.cuda.synchronize()
        return self.cycles.read()


def fences(bench: Bench) -> dict[str, Any]:
    """Time fences, idle and under load."""
    rows = []
    for text, kind in FENCES.items():
        if "proxy" in text and not copy_piece(bench.context.architecture):
            continue
        for load in (False, True):
            found = [bench.run(f"fence<gpu_lab::{kind}>", *shape, load=load)[0] for shape in SHAPES]
            rows.append([text, "under load" if load else "idle", *found])
    shapes = [f"{blocks} x {warps} warps, {stores} stores" for blocks, warps, stores in SHAPES]
    return probe.table("Fences, cycles", ["fence", "memory", *shapes], rows)


def others(bench: Bench) -> dict[str, Any]:
    """Time additions, loads and bulk loads, idle and under load."""
    rows: list[list[Any]] = []
    for load in (False, True):
        memory = "under load" if load else "idle"
        for text, kind in ADDITIONS.items():
            rows.append([text, memory, bench.run(f"addition<gpu_lab::{kind}>", 1, 1, 0, load=load)[0]])
        first, again = bench.run("dependent_loads", 1, 1, STRIDE, load=load)
        rows += [["load, from memory", memory, first], ["load, from the L2 cache", memory, again]]
        for size in BULK_BYTES if copy_piece(bench.context.architecture) else ():
            for blocks in (1, 64):
                found = bench.run("bulk_loads<>", blocks, 1, size, shared=max(BULK_BYTES), load=load)[0]
                rows.append([f"bulk load of {size} bytes, {blocks} at once", memory, found])
    return probe.table("Other operations, cycles", ["operation", "memory", "cycles"], rows)


def launches(bench: Bench) -> dict[str, Any]:
    """Time launches of an empty kernel, plain and cooperative."""
    kernel = probe.BareKernel(bench.context, probe.compiled("empty.cu", "gpu_lab::empty", bench.context))
    stream, gate = torch.cuda.ExternalStream(bench.launcher.stream), probe.Gate()

    def measure(threads: int, cooperative: bool) -> float:
        def queue() -> None:
            for _ in range(LAUNCHES):
                kernel.launch(bench.launcher.stream, 16, threads, probe.words(0), cooperative=cooperative)

        return probe.median_of(TIMES, lambda: gate.time([stream], queue)) * 1e3 / LAUNCHES

    rows = [
        ["cooperative" if cooperative else "plain", threads, measure(threads, cooperative)]
        for cooperative in (False, True)
        for threads in (32, 512)
    ]
    return probe.table("Launches of an empty kernel of 16 blocks, us each", ["launch", "threads", "us"], rows)


@click.command()
@click.option("--json", "json_file", type=OutputFile(), help="Write the figures here.")
def main(json_file: Path | None) -> None:
    """Time single operations."""
    bench = Bench()
    probe.write_figures(json_file, BOUNDARY, [fences(bench), others(bench), launches(bench)])


if __name__ == "__main__":
    main()
