"""V2's stream arguments."""

from __future__ import annotations

from typing import Any

from deep_ep_py.base import arguments
from deep_ep_py.base.events import EventHandle, EventOverlap, Streams


def streams(
    previous_event: Any,
    previous_event_before_epilogue: Any,
    async_with_compute_stream: Any,
    allocate_on_comm_stream: Any,
) -> Streams:
    """Check the stream arguments of a call.

    Without `previous_event`, kernels wait for all work that the caller has queued, also if tensors are allocated on the
    communication stream.

    Raises
    ------
    TypeError, ValueError
        The message names the argument.
    """
    previous = _event("previous_event", previous_event)
    before_outputs = _event("previous_event_before_epilogue", previous_event_before_epilogue)
    asynchronous = arguments.flag("async_with_compute_stream", async_with_compute_stream)
    on_comm = arguments.flag("allocate_on_comm_stream", allocate_on_comm_stream)
    if previous is not None and not on_comm:
        raise ValueError(
            "previous_event: expected allocate_on_comm_stream=True as well, since memory of the current stream may "
            "still be in use by work that this call does not wait for"
        )
    if on_comm and previous is None:
        previous = EventHandle()
    return Streams(previous, asynchronous, on_comm, before_outputs)


def _event(name: str, value: Any) -> EventHandle | None:
    if isinstance(value, EventOverlap):
        return value.event
    if value is not None and not isinstance(value, EventHandle):
        raise TypeError(f"{name}={arguments.describe(value)}: expected an EventHandle or an EventOverlap")
    return value
