"""Kernel times by the GPU's own clock, and the copy rate of the GPU."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from deep_ep_py.transport.bootstrap.groups import Bootstrap

if TYPE_CHECKING:
    from deep_ep_py import Buffer, Config

BOUNDARY = (
    "Kernels only. All ranks queue the call behind an event that has not happened yet; when it happens, all start. A "
    "sample is the time from the first rank's start to the last rank's end, by CUDA events on the ranks' streams; the "
    "figure is the median over the timed iterations. Host work (Python, launches, waiting for counts) is outside."
)
LINKED_BOUNDARY = (
    "Kernels only. Each rank is a process with a GPU of its own, and the GPUs have no common clock. On every rank the "
    "call is queued behind a small dispatch among all ranks, which ends on all of them at nearly the same time, and "
    "that behind an event that has not happened yet. A sample is the time from the end of that dispatch to the end of "
    "the call by CUDA events on the rank's own streams, for the slowest rank; the figure is the median over the timed "
    "iterations. Host work (Python, launches, waiting for counts) is outside."
)
NODES_BOUNDARY = " Between nodes that dispatch ends within about the time that a message takes from one to another."
_CYCLES_PER_MS = 2_000_000
_GATE_CYCLES = 2_000_000  # the launch is queued by then
_ALIGNED_GATE_CYCLES = 5 * _GATE_CYCLES  # the ranks' hosts do not start together, and launch twice
_COPY_BYTES = 1 << 30
_COPIES = 20


class _Timer:
    """Times work that all ranks queue together, behind gates that open when all of it is queued.

    Parameters
    ----------
    ranks
        All ranks.
    """

    def __init__(self, ranks: Bootstrap) -> None:
        self._ranks = ranks
        self._gate_stream = torch.cuda.Stream()
        self._gate_ms: dict[str, float] = defaultdict(lambda: 20.0)
        self._samples: dict[str, list[tuple[float, float]]] = defaultdict(list)
        self._late = 0
        self.recording = False
        """Whether samples are kept: not while warming up."""

    def _close_gate(self, name: str) -> torch.cuda.Event:
        torch.cuda.synchronize()
        gate = torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(self._gate_stream):
            torch.cuda._sleep(int(self._gate_ms[name] * _CYCLES_PER_MS))
            gate.record()
        return gate

    def _keep(self, name: str, begin: float, end: float, late: bool) -> None:
        if late:
            self._gate_ms[name] *= 2
        if self.recording:
            self._late += late
            self._samples[name].append((begin, end))

    def series(self) -> dict[str, list[float]]:
        """Gather the samples of all ranks.

        Returns
        -------
        dict
            For each name, the milliseconds of each iteration, the same on every rank.
        """
        everyones = self._ranks.all_gather(dict(self._samples))
        return {
            name: [
                max(end for _, end in spans) - min(begin for begin, _ in spans)
                for spans in zip(*(samples[name] for samples in everyones), strict=True)
            ]
            for name in self._samples
        }

    def late_starts(self) -> int:
        """Return how many samples started before all ranks had queued their work, summed over the ranks."""
        return sum(self._ranks.all_gather(self._late))


class GpuTimer(_Timer):
    """A timer for ranks that are threads of this process on one GPU: one gate and one clock for all."""

    def time(self, name: str, call: Callable[[], Any], stream: torch.cuda.Stream | None = None) -> Any:
        """Queue a call together with the other ranks, and time its work on the GPU.

        Parameters
        ----------
        name
            The series that the sample belongs to.
        call
            Queues work on the current stream.
        stream
            The stream of its last work, if that is not the current one.

        Returns
        -------
        object
            The result of the call.
        """
        gate = self._ranks.all_gather(self._close_gate(name) if self._ranks.rank == 0 else None)[0]
        current = torch.cuda.current_stream()
        current.wait_event(gate)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record(current)
        result = call()
        end.record(stream or current)
        self._ranks.all_gather(None)
        late = bool(gate.query())  # it opened before all ranks had queued their work
        self._ranks.all_gather(None)
        end.synchronize()
        self._keep(name, gate.elapsed_time(begin), gate.elapsed_time(end), late)
        return result


class LinkedTimer(_Timer):
    """A timer for ranks that are processes with a GPU each: a gate and a clock per rank, and work that aligns them.

    Parameters
    ----------
    ranks
        All ranks.
    align
        Queues work on the current stream that ends on all GPUs at once.
    """

    def __init__(self, ranks: Bootstrap, align: Callable[[], Any]) -> None:
        super().__init__(ranks)
        self._align = align

    def time(self, name: str, call: Callable[[], Any], stream: torch.cuda.Stream | None = None) -> Any:
        """Queue a call together with the other ranks, and time its work on this rank's GPU; as `GpuTimer.time`."""
        self._ranks.all_gather(None)  # so that gates close at about the same time
        gate = self._close_gate(name)
        current = torch.cuda.current_stream()
        current.wait_event(gate)
        self._align()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record(current)
        result = call()
        end.record(stream or current)
        self._ranks.all_gather(None)
        # The aligning work cannot have ended while any gate was still closed, and by now all ranks have queued theirs.
        late = all(self._ranks.all_gather(bool(gate.query())))
        end.synchronize()
        self._keep(name, 0.0, begin.elapsed_time(end), late)
        return result


def make_aligner(buffer: Buffer, row: Any, config: Config | None) -> Callable[[], Any]:
    """Return a function that queues a dispatch which ends nowhere before it has started everywhere. Collective.

    Parameters
    ----------
    buffer
        A Buffer of ranks with a GPU each.
    row
        The x of that dispatch, for a single token, which goes from each rank to each.
    config
        The configuration of that dispatch.
    """
    counts = torch.ones(buffer.group_size, dtype=torch.int32, device=buffer.device)
    everywhere = counts.to(torch.bool).unsqueeze(0)
    handle = buffer.dispatch(
        row, num_tokens_per_rank=counts, is_token_in_rank=everywhere, num_tokens_per_expert=counts, config=config
    )[4]
    return partial(buffer.dispatch, row, handle=handle, config=config)


class EventTimer:
    """Times the work that a call launches on a stream, by the GPU's clock."""

    def time(
        self, launch: Callable[[], Any], stream: torch.cuda.Stream, align: Callable[[], Any] | None = None
    ) -> tuple[Any, float]:
        """Return the result of `launch`, and the time of its work in milliseconds.

        Parameters
        ----------
        launch
            Launches the work to time.
        stream
            The stream of that work.
        align
            Launches work on that stream first that ends on all ranks' GPUs at once.
        """
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(stream):
            torch.cuda._sleep(_GATE_CYCLES if align is None else _ALIGNED_GATE_CYCLES)
        if align is not None:
            align()
        begin.record(stream)
        launched = launch()
        end.record(stream)
        end.synchronize()
        return launched, begin.elapsed_time(end)


def measure_copy() -> float:
    """Return the GB/s of copies within this GPU's memory, bytes read plus bytes written: the median of a few copies."""
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
