"""How long kernels take, by the GPU's own clock, and how fast that GPU copies."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

BOUNDARY = (
    "Kernels alone. All ranks queue the call behind an event that has not happened yet; when it happens, all begin. A "
    "sample is the time from the first rank's begin to the last rank's end, by CUDA events on the ranks' streams; the "
    "figure is the median over the timed iterations. Host work (Python, launches, waiting for counts) is outside."
)
_CYCLES_PER_MS = 2_000_000
_GATE_CYCLES = 2_000_000  # the launch is queued by then
_COPY_BYTES = 1 << 30
_COPIES = 20


class GpuTimer:
    """Times what all ranks queue together.

    Parameters
    ----------
    group
        The ranks, threads of this process on one GPU.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self._gate_stream = torch.cuda.Stream()
        self._gate_ms: dict[str, float] = defaultdict(lambda: 20.0)
        self._samples: dict[str, list[tuple[float, float]]] = defaultdict(list)
        self._late = 0
        self.recording = False
        """Whether samples are kept: not while warming up."""

    def time(self, name: str, call: Callable[[], Any], stream: torch.cuda.Stream | None = None) -> Any:
        """Queue a call together with the other ranks, and time what it does on the GPU.

        Parameters
        ----------
        name
            The series that the sample belongs to.
        call
            Queues work on the current stream.
        stream
            Where its last work is, if not on the current stream.

        Returns
        -------
        object
            What the call returns.
        """
        gate = self._group.broadcast_object(self._close_gate(name) if self._group.rank() == 0 else None)
        current = torch.cuda.current_stream()
        current.wait_event(gate)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record(current)
        result = call()
        end.record(stream or current)
        self._group.barrier()
        late = bool(gate.query())  # it opened before all ranks had queued their work
        self._group.barrier()
        end.synchronize()
        if late:
            self._gate_ms[name] *= 2
        if self.recording:
            self._late += late
            self._samples[name].append((gate.elapsed_time(begin), gate.elapsed_time(end)))
        return result

    def _close_gate(self, name: str) -> torch.cuda.Event:
        torch.cuda.synchronize()
        gate = torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(self._gate_stream):
            torch.cuda._sleep(int(self._gate_ms[name] * _CYCLES_PER_MS))
            gate.record()
        return gate

    def series(self) -> dict[str, list[float]]:
        """Gather the samples of all ranks.

        Returns
        -------
        dict
            For each name the milliseconds of each iteration, the same on every rank.
        """
        everyones = self._group.all_gather_object(dict(self._samples))
        return {
            name: [
                max(end for _, end in spans) - min(begin for begin, _ in spans)
                for spans in zip(*(samples[name] for samples in everyones), strict=True)
            ]
            for name in self._samples
        }

    def late_starts(self) -> int:
        """Return how many samples some rank had not queued in time, over all ranks."""
        return sum(self._group.all_gather_object(self._late))


class EventTimer:
    """Times what a call launches on a stream, by the GPU's clock."""

    def time(self, launch: Callable[[], Any], stream: torch.cuda.Stream) -> tuple[Any, float]:
        """Return what `launch` returns, and milliseconds."""
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(stream):
            torch.cuda._sleep(_GATE_CYCLES)
        begin.record(stream)
        launched = launch()
        end.record(stream)
        end.synchronize()
        return launched, begin.elapsed_time(end)


def measure_copy() -> float:
    """Return GB/s that this GPU copies within its memory: bytes read and bytes written, the median of a few copies."""
    source = torch.randint(1 << 30, (_COPY_BYTES // 4,), dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    times = []
    for _ in range(_COPIES):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return 2 * _COPY_BYTES / statistics.median(times) / 1e6
