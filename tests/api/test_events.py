"""V1's events, as callers use them. test_cuda_streams.py tests the order that they impose on a GPU."""

from __future__ import annotations

import pytest

from deep_ep_py import Buffer, EventHandle, EventOverlap

pytestmark = pytest.mark.once


class Waited(EventHandle):
    """An event that counts its waits."""

    def __init__(self) -> None:
        super().__init__()
        self.waits = 0

    def current_stream_wait(self) -> None:
        self.waits += 1
        super().current_stream_wait()


def test_waiting() -> None:
    event = Waited()
    overlap = EventOverlap(event, extra_tensors=("tensor",))
    overlap.current_stream_wait()
    overlap.current_stream_wait(release_handle=False)
    assert event.waits == 2 and overlap.event is event and overlap.extra_tensors == ("tensor",)
    overlap.current_stream_wait(release_handle=True)
    assert event.waits == 3 and overlap.event is None and overlap.extra_tensors is None


def test_with_statement() -> None:
    event = Waited()
    overlap = EventOverlap(event)
    with overlap as inside:
        assert inside is overlap and event.waits == 0
    assert event.waits == 1 and overlap.event is event
    with overlap(release_handle=True) as inside:
        assert inside is overlap and event.waits == 1, "a wait set up for the end of the body must not happen earlier"
    assert event.waits == 2 and overlap.event is None


def test_releasing_is_of_one_with_statement() -> None:
    overlap = EventOverlap(Waited())
    overlap(release_handle=True)(release_handle=False)
    with overlap:
        pass
    assert overlap.event is not None


def test_hook_after_wait() -> None:
    order: list[str] = []
    overlap = EventOverlap(EventHandle())
    overlap.register_hook_after_wait(hook_after_wait=lambda: order.append("hook"))
    assert order == []
    overlap.current_stream_wait()
    overlap.current_stream_wait()
    assert order == ["hook"]


def test_capture() -> None:
    overlap = Buffer.capture()
    assert isinstance(overlap, EventOverlap) and isinstance(overlap.event, EventHandle)
    overlap.current_stream_wait()
    overlap.event.current_stream_wait()
