"""V1's events: recorded on a CUDA stream, or standing for a call on a CPU that returned before it finished."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

from deep_ep_py.base.not_compiled import not_compiled


class EventHandle:
    """An event recorded on the current stream when it is constructed.

    If this process does not use CUDA there are no streams: the event has already happened, unless it stands for a call.

    Parameters
    ----------
    stream : torch.cuda.Stream, optional
        Record the event on this stream instead.
    until : callable, optional
        Waits for a call on a CPU instead, and raises the error of that call.
    work_on : torch.cuda.Stream, optional
        Stand for all work queued on this stream instead. Nothing is recorded until another stream waits, which then
        waits for what has been queued by that time.
    """

    def __init__(
        self, stream: Any = None, until: Callable[[], None] | None = None, work_on: torch.cuda.Stream | None = None
    ) -> None:
        self._event: torch.cuda.Event | None = None
        self._until, self._work_on = until, work_on
        if until is not None or work_on is not None:
            return
        if stream is not None or torch.cuda.is_initialized():
            self._event = torch.cuda.Event()
            self._event.record(stream or torch.cuda.current_stream())

    @not_compiled
    def wait_on(self, stream: Any) -> None:
        """Make a stream wait for the event; if it stands for a call on a CPU, the calling thread waits instead."""
        if self._until is not None:
            self.current_stream_wait()
        if self._event is not None:
            stream.wait_event(self._event)
        elif self._work_on is not None and self._work_on != stream:
            stream.wait_stream(self._work_on)

    @not_compiled
    def current_stream_wait(self) -> None:
        """Make the current stream wait for the event; on a CPU, which has no streams, the calling thread waits."""
        if self._until is not None:
            self._until()
            self._until = None  # cleared only now: another thread that waits at the same time must wait too
        if self._event is not None or self._work_on is not None:
            self.wait_on(torch.cuda.current_stream())


class EventOverlap:
    """An event and the tensors that must stay alive until it has happened.

    Parameters
    ----------
    event : EventHandle, optional
        The event; None means that it has already happened.
    extra_tensors : tuple of torch.Tensor, optional
        Kept alive as long as this object.
    """

    def __init__(self, event: EventHandle | None = None, extra_tensors: tuple[Any, ...] | None = None) -> None:
        self.event = event
        self.extra_tensors = extra_tensors
        self._release_on_exit = False
        self._hooks: list[Callable[[], None]] = []

    def register_hook_after_wait(self, hook_after_wait: Callable[[], None]) -> None:
        """Call the hook once, after the next wait."""
        self._hooks.append(hook_after_wait)

    @not_compiled
    def current_stream_wait(self, release_handle: bool = False) -> None:
        """Make the current stream wait for the event.

        Parameters
        ----------
        release_handle : bool
            Drop the event and the tensors afterwards.
        """
        if self.event is not None:
            self.event.current_stream_wait()
        hooks, self._hooks = self._hooks, []
        for hook in hooks:
            hook()
        if release_handle:
            self.event = None
            self.extra_tensors = None

    def __call__(self, release_handle: bool = False) -> EventOverlap:
        """Set whether a `with` statement over this object releases the event: `with event(release_handle=True):`."""
        self._release_on_exit = release_handle
        return self

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Wait as `current_stream_wait` does: work that the body queued overlaps with the event's operation."""
        release, self._release_on_exit = self._release_on_exit, False
        self.current_stream_wait(release)


@dataclass(frozen=True)
class Streams:
    """How a call is ordered with its caller's other work: the stream arguments of V1 and V2."""

    previous: EventOverlap | EventHandle | None = None
    async_finish: bool = False
    allocate_on_comm: bool = False
    before_outputs: EventHandle | None = None
    """What must have happened as well before outputs are written."""

    @property
    def event(self) -> EventHandle | None:
        """The event that kernels wait for; None if they wait only for the caller's stream."""
        return self.previous.event if isinstance(self.previous, EventOverlap) else self.previous
