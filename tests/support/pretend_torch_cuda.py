"""A replacement for the parts of `torch.cuda` that benchmarks and GPU tests use, where there is no GPU: devices with
names, events by the CPU's clock, graphs of the stand-in for the driver.

Streams impose no order here: the work of a call has ended when it returns, and gates open at their time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import torch

import pretend_gpu

_CYCLES_PER_MS = 2_000_000


class Stream:
    """A stream that is idle except while it sleeps."""

    idle_at = 0.0
    stream_id = 3  # torch's own

    @cached_property
    def cuda_stream(self) -> int:
        return pretend_gpu.make_stream()

    def wait_event(self, event: Event) -> None: ...
    def wait_stream(self, stream: Stream) -> None: ...
    def synchronize(self) -> None: ...


class Event:
    """An event that occurs when the current stream has finished sleeping."""

    def __init__(self, enable_timing: bool = False) -> None:
        del enable_timing
        self._at: float | None = None

    def record(self, stream: Stream | None = None) -> None:
        sleeping = _current.idle_at if stream is None else 0.0
        self._at = max(time.perf_counter(), sleeping)

    def query(self) -> bool:
        assert self._at is not None
        return time.perf_counter() >= self._at

    def synchronize(self) -> None:
        assert self._at is not None
        time.sleep(max(0.0, self._at - time.perf_counter()))

    def elapsed_time(self, end: Event) -> float:
        assert self._at is not None and end._at is not None
        return 1e3 * (end._at - self._at)


_current = Stream()


def _sleep(cycles: int) -> None:
    _current.idle_at = time.perf_counter() + cycles / _CYCLES_PER_MS / 1e3


def install(uuids: list[str], replace: Callable[[Any, str, Any], None] = setattr) -> list[int]:
    """Let this process see one GPU for each UUID. Returns a list that holds the index of the current one."""
    current = [0]

    def set_device(index: int) -> None:
        assert 0 <= index < len(uuids), f"there is no GPU {index}"
        current[0] = index

    def get_device_properties(index: int) -> Any:
        return SimpleNamespace(
            name="Double", uuid=uuids[index], multi_processor_count=132, total_memory=1 << 30, index=index
        )

    replaced: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: len(uuids),
        "set_device": set_device,
        "current_device": lambda: current[0],
        "get_device_properties": get_device_properties,
        "current_stream": lambda device=None: _current,
        "stream": lambda stream: nullcontext(),
        "synchronize": lambda: None,
        "Stream": Stream,
        "ExternalStream": lambda handle, device=None: Stream(),
        "Event": Event,
        "_sleep": _sleep,
        "CUDAGraph": pretend_gpu.Graph,
        "graph": lambda graph, **options: graph.capture(),
    }
    for name, value in replaced.items():
        replace(torch.cuda, name, value)
    return current
