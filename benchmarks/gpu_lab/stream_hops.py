"""What a call costs besides its kernels, by the streams that it uses. The kernel is empty."""

from __future__ import annotations

from collections.abc import Callable
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
    "threads: by the driver alone; by the library on the caller's stream, as for low-latency calls; on two streams of "
    "the caller by turns, with an event behind each launch; on the library's stream, which first waits for the "
    "caller's, which then waits for it, as for calls of normal mode. The host's work is outside."
)
RANKS = (1, 8)
CALLS, TIMES = 20, 9
_BLOCKS = 16


class Rank:
    """A rank's device, as a Buffer makes it, and two streams of its caller, which no other rank uses."""

    def __init__(self, ranks: int) -> None:
        self.device = CudaDevice(probe.gpu(), sharers=ranks)
        self.device._ranks_are_threads = False
        self.callers, self._launcher = [torch.cuda.Stream() for _ in range(2)], self.device._launcher
        code = probe.compiled("empty.cu", "gpu_lab::empty", self.device.context)
        self._launcher.load("empty", probe.NO_SHAPE, code.cubin, code.symbol)
        self._bare = probe.BareKernel(self.device.context, code)

    def driver_alone(self, call: int) -> None:
        """Launch without the library."""
        del call
        threads, cooperative = self.device.warps * probe.WARP_THREADS, choices.chosen(choices.LAUNCH) == "cooperative"
        self._bare.launch(self.callers[0].cuda_stream, _BLOCKS, threads, probe.words(0), cooperative=cooperative)

    def callers_stream(self, call: int, streams: int = 1) -> None:
        """Launch on the caller's stream."""
        with torch.cuda.stream(self.callers[call % streams]):
            self.device.launch_on_callers_stream()
            self._launch()
            self.device.order_caller_after([], False, False)

    def two_streams(self, call: int) -> None:
        """Launch on the caller's streams by turns."""
        self.callers_stream(call, 2)

    def own_stream(self, call: int) -> None:
        """Launch on the library's stream."""
        del call
        with torch.cuda.stream(self.callers[0]):
            self.device.order_after_caller(None, False)
            self._launch()
            self.device.order_caller_after([], False, False)

    def _launch(self) -> None:
        self._launcher.launch("empty", probe.NO_SHAPE, _BLOCKS, self.device.warps, 0, probe.words(0))


CALLS_BY = (Rank.driver_alone, Rank.callers_stream, Rank.own_stream, Rank.two_streams)


def measure(gate: probe.Gate, ranks: list[Rank], call_by: Callable[[Rank, int], None]) -> float:
    """Return the microseconds of a call."""
    streams: list[Any] = [stream for rank in ranks for stream in rank.callers]

    def queue() -> None:
        for call in range(CALLS):
            for rank in ranks:
                call_by(rank, call)

    return probe.median_of(TIMES, lambda: gate.time(streams, queue)) * 1e3 / CALLS


@click.command()
@click.option("--json", "json_file", type=OutputFile(), help="Write the figures here.")
def main(json_file: Path | None) -> None:
    """Time calls with an empty kernel."""
    gate, rows = probe.Gate(), []
    for count in RANKS:
        # A launcher that has changed its stream once records events from then on.
        rows.append([count, *(measure(gate, [Rank(count) for _ in range(count)], call_by) for call_by in CALLS_BY)])
    columns = ["ranks", *(call_by.__name__.replace("_", " ") for call_by in CALLS_BY)]
    probe.write_figures(json_file, BOUNDARY, [probe.table("Calls with an empty kernel, us each", columns, rows)])


if __name__ == "__main__":
    main()
