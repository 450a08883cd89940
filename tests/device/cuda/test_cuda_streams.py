"""The order of calls on a GPU and their caller's work, on streams that only record what precedes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from deep_ep_py.base.events import EventHandle, EventOverlap
from deep_ep_py.device.cuda import CudaDevice

pytestmark = pytest.mark.once


class FakeStream:
    """A stream; `seen` is all work that has ended when the work queued next begins. `stream_id` is torch's."""

    def __init__(self, stream_id: int = 3) -> None:
        self.seen: set[str] = set()
        self.stream_id = stream_id

    def work(self, name: str) -> None:
        self.seen.add(name)

    @property
    def cuda_stream(self) -> int:
        return id(self)

    def wait_stream(self, other: FakeStream) -> None:
        self.seen |= other.seen

    def wait_event(self, event: FakeEvent) -> None:
        self.seen |= event.seen


class FakeEvent:
    def record(self, stream: FakeStream) -> None:
        self.seen = set(stream.seen)


class FakeTensor:
    def __init__(self) -> None:
        self.streams: list[FakeStream] = []

    def record_stream(self, stream: FakeStream) -> None:
        self.streams.append(stream)


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> FakeStream:
    stream = FakeStream()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: stream)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    return stream


class FakeLauncher:
    def __init__(self) -> None:
        self.keeps_stream = False
        self.stream: int | None = None  # that launches go to; None: its own

    def launch_on(self, stream: int | None, ends: bool = False) -> None:
        self.stream, self.ends = stream, ends

    def keep_stream(self) -> None:
        self.keeps_stream = True


@pytest.fixture
def device() -> Any:
    device = CudaDevice.__new__(CudaDevice)
    device.torch_device = torch.device("cuda", 0)
    device.__dict__["_stream"] = FakeStream()
    device._launcher = FakeLauncher()
    device._ranks_are_threads = False
    device._callers_stream = None
    return device


@pytest.mark.parametrize("async_finish", [False, True])
def test_a_stream_that_tensors_are_used_on_is_kept(device: Any, current: FakeStream, async_finish: bool) -> None:
    """torch uses it again when they are freed, which may be after the Buffer is."""
    device.order_after_caller(None, on_comm_stream=False)
    device.order_caller_after([FakeTensor(), None], async_finish, on_comm_stream=False)
    assert device._launcher.keeps_stream == async_finish


def test_kernels_come_after_the_callers_work(device: Any, current: FakeStream) -> None:
    current.work("experts")
    device.order_after_caller(None, on_comm_stream=False)
    assert device.comm_stream.seen == {"experts"}


def test_an_event_and_the_outputs_memory(device: Any, current: FakeStream) -> None:
    """Outputs allocated on the current stream may be in memory that its earlier work still writes."""
    event = EventHandle()
    current.work("later")
    device.order_after_caller(event, on_comm_stream=False)
    assert device.comm_stream.seen == {"later"}


def test_an_event_alone(device: Any, current: FakeStream) -> None:
    current.work("experts")
    event = EventHandle()
    current.work("later")
    device.order_after_caller(event, on_comm_stream=True)
    assert device.comm_stream.seen == {"experts"}


def test_the_caller_waits(device: Any, current: FakeStream) -> None:
    tensor = FakeTensor()
    device.comm_stream.work("dispatch")
    device.order_caller_after([tensor, None], async_finish=False, on_comm_stream=False)
    assert current.seen == {"dispatch"}
    assert tensor.streams == [], "any reuse of its memory is ordered after the kernels anyway"


def test_what_is_allocated_on_the_communication_stream_is_used_on_the_callers(device: Any, current: FakeStream) -> None:
    """Although the caller waits: once it drops the tensor, the communication stream must not reuse it too soon."""
    tensor = FakeTensor()
    device.order_caller_after([tensor], async_finish=False, on_comm_stream=True)
    assert tensor.streams == [current]


@pytest.mark.parametrize("on_comm_stream", [False, True])
def test_the_caller_waits_later(device: Any, current: FakeStream, on_comm_stream: bool) -> None:
    tensor = FakeTensor()
    device.comm_stream.work("dispatch")
    overlap = EventOverlap(device.order_caller_after([tensor, None], True, on_comm_stream))
    device.comm_stream.work("next")
    assert current.seen == set()
    overlap.current_stream_wait()
    assert current.seen == {"dispatch"}
    assert tensor.streams == ([device.comm_stream, current] if on_comm_stream else [device.comm_stream])


def test_kernels_on_the_callers_stream(device: Any, current: FakeStream, monkeypatch: pytest.MonkeyPatch) -> None:
    """No stream waits for another, unless the result is used on a third."""
    other = FakeStream()
    current.work("experts")
    device.launch_on_callers_stream()
    assert device._launcher.stream == current.cuda_stream
    current.work("dispatch")
    overlap = EventOverlap(device.order_caller_after([FakeTensor()], async_finish=False, on_comm_stream=False))
    overlap.current_stream_wait()
    assert device.comm_stream.seen == set() and current.seen == {"experts", "dispatch"}
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: other)
    overlap.current_stream_wait()
    assert other.seen == {"experts", "dispatch"}


def test_the_next_kernels_may_go_to_the_communication_stream(device: Any, current: FakeStream) -> None:
    device.launch_on_callers_stream()
    current.work("low latency")
    device.order_after_caller(None, on_comm_stream=False)
    assert device._launcher.stream is None and device.comm_stream.seen == {"low latency"}
    device.comm_stream.work("normal")
    device.order_caller_after([], async_finish=False, on_comm_stream=False)
    assert current.seen == {"low latency", "normal"}


@pytest.mark.parametrize(("stream_id", "ends"), [(0, False), (35, False), (0x7F00, True)])
def test_streams_of_others_may_end(device: Any, monkeypatch: pytest.MonkeyPatch, stream_id: int, ends: bool) -> None:
    """torch keeps the default stream and those of its pool; the identifier of any other is its handle."""
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: FakeStream(stream_id))
    device.launch_on_callers_stream()
    assert device._launcher.ends == ends


def test_ranks_that_are_threads_keep_off_their_callers_stream(device: Any, current: FakeStream) -> None:
    """It may be the same for all: the kernel of one rank would be ahead of the work of those that it waits for."""
    device._ranks_are_threads = True
    current.work("experts")
    device.launch_on_callers_stream()
    assert device._launcher.stream is None and device.comm_stream.seen == {"experts"}


def test_what_is_queued_later_goes_where_the_call_was_made(
    device: Any, current: FakeStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hook may be called while another, busy stream is current."""
    streams = [current]

    @contextmanager
    def switched(stream: FakeStream) -> Iterator[None]:
        streams.append(stream)
        yield
        streams.pop()

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: streams[-1])
    monkeypatch.setattr(torch.cuda, "stream", switched)
    where, other = device.callers_stream(), FakeStream()
    current.work("experts")
    other.work("something else")
    with torch.cuda.stream(other), where():
        device.order_after_caller(None, on_comm_stream=False)
        device.comm_stream.work("receive")
        device.order_caller_after([], async_finish=False, on_comm_stream=False)
    assert current.seen == device.comm_stream.seen == {"experts", "receive"}
    assert other.seen == {"something else"}


def test_without_cuda_an_event_has_happened() -> None:
    handle = EventHandle()
    handle.current_stream_wait()
    handle.wait_on(None)
    assert not torch.cuda.is_initialized()
