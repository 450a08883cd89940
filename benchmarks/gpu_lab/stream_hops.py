"""What a call costs besides its kernels: the waits between the caller's stream and the library's, and the event that
follows each launch. The kernel is empty.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import torch

from benchmarks.gpu_lab import probe
from deep_ep_py.base import choices
from deep_ep_py.base.options import OutputFile
from deep_ep_py.device.cuda import CudaDevice

BOUNDARY = (
    "Microseconds from one call to the next, of 20 calls that each rank has queued behind a gate: from its opening to "
    "the end on the last rank, by events; the median of 9. A call is the launch of an empty kernel of 16 blocks of 512 "
    "threads on the stream of the library. With hops, that stream first waits for the caller's, which then waits for "
    "it, as around every call of a Buffer. With an event, the library launches, which records one after each launch; "
    "without, the driver is called directly. The host's work is outside."
)
RANKS = (1, 8)
CALLS, TIMES = 20, 9
_BLOCKS = 16


class Rank:
    """A rank's device, as a Buffer makes it, and its caller's stream."""

    def __init__(self, ranks: int) -> None:
        self.device = CudaDevice(probe.gpu(), sharers=ranks)
        self.caller, launcher = torch.cuda.Stream(), self.device._launcher
        code = probe.compiled("empty.cu", "gpu_lab::empty", self.device.context)
        launcher.load("empty", probe.NO_SHAPE, code.cubin, code.symbol)
        self._bare = probe.BareKernel(self.device.context, code)
        self._launcher = launcher

    def launch(self, event: bool) -> None:
        """Launch the kernel on the library's stream."""
        warps = self.device.warps
        if event:
            self._launcher.launch("empty", probe.NO_SHAPE, _BLOCKS, warps, 0, probe.words(0))
        else:
            threads, cooperative = warps * probe.WARP_THREADS, choices.chosen(choices.LAUNCH) == "cooperative"
            self._bare.launch(self._launcher.stream, _BLOCKS, threads, probe.words(0), cooperative=cooperative)

    def call(self, hops: bool, event: bool) -> None:
        """Queue a call, as `Buffer`'s calls do."""
        with torch.cuda.stream(self.caller):
            if hops:
                self.device.order_after_caller(None, False)
            self.launch(event)
            if hops:
                self.device.order_caller_after([], False, False)


def measure(gate: probe.Gate, ranks: list[Rank], hops: bool, event: bool) -> float:
    """Return the microseconds of a call."""
    streams: list[Any] = [rank.caller if hops else rank.device.comm_stream for rank in ranks]

    def queue() -> None:
        for _ in range(CALLS):
            for rank in ranks:
                rank.call(hops, event)

    return probe.median_of(TIMES, lambda: gate.time(streams, queue)) * 1e3 / CALLS


@click.command()
@click.option("--json", "json_file", type=OutputFile(), help="Write the figures here.")
def main(json_file: Path | None) -> None:
    """Time calls with an empty kernel."""
    gate, rows = probe.Gate(), []
    for count in RANKS:
        ranks = [Rank(count) for _ in range(count)]
        for hops in (False, True):
            found = [measure(gate, ranks, hops, event) for event in (False, True)]
            rows.append([count, "with hops" if hops else "launch alone", *found])
    columns = ["ranks", "call", "us without an event", "us with an event"]
    probe.write_figures(json_file, BOUNDARY, [probe.table("Calls with an empty kernel, us each", columns, rows)])


if __name__ == "__main__":
    main()
