"""Memory for experts' results, from which zero-copy combines read them."""

from __future__ import annotations

import logging
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from deep_ep_py.base.events import EventOverlap
from deep_ep_py.base.kept import kept
from deep_ep_py.errors import DeepEPError
from deep_ep_py.modes.low_latency.handles import Origin

if TYPE_CHECKING:
    from deep_ep_py.session.engine import Engine

Shape = tuple[int, int, int]

_log = logging.getLogger("deep_ep_py")


@dataclass(eq=False)
class View:
    """A tensor for results, and its use."""

    memory: torch.Tensor
    given_for: int | None = None  # the number of the dispatch whose results it is for
    used_by: tuple[int, int] | None = None  # generation and number of the operation that reads it
    event: EventOverlap | None = None  # the end of that operation, if it has no hook


class Views:
    """Views for results, up to one of each shape per region of the Buffer. They are made on first use and kept.

    Parameters
    ----------
    engine : Engine
        The engine of the Buffer.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._views: dict[Shape, list[View]] = defaultdict(list)

    def next_for(self, origin: Origin, shape: Shape) -> torch.Tensor:
        """Return the view for the next zero-copy combine of a dispatch's results; the same until that combine.

        Raises
        ------
        DeepEPError
            The combines of all views are still open.
        """
        view = self._given_for(origin, shape) or self._unused(shape)
        if view.event is not None and self._is_of_now(view):  # other ranks may still read the old contents
            view.event.current_stream_wait()
        view.event = None
        view.given_for = origin.number
        return view.memory

    def take(self, origin: Origin, shape: Shape) -> View:
        """Return the view for the combine that is being issued.

        Raises
        ------
        ValueError
            The caller did not ask for a view first.
        """
        view = self._given_for(origin, shape)
        if view is None:
            raise ValueError("zero_copy=True: expected a call of get_next_low_latency_combine_buffer(handle) first")
        return view

    @kept
    def _new(self, shape: Shape) -> torch.Tensor:
        """Allocate a view, where other ranks can read it if there is room."""
        memory = self._engine.empty(shape, torch.bfloat16)
        if memory.nbytes != 0 and not self._engine.runtime.arena_contains(memory.data_ptr(), memory.nbytes):
            _log.warning(
                "rank %d: get_next_low_latency_combine_buffer: %d bytes for results do not fit into the shared memory "
                "of the ranks, so zero-copy combines will copy them; make the Buffer with a larger arena_bytes",
                self._engine.rank,
                memory.nbytes,
            )
        return memory

    def _is_read(self, view: View) -> bool:
        """Return whether an operation whose hook has not been called reads it."""
        return self._is_of_now(view) and view.used_by is not None and self._engine.is_open(view.used_by[1])

    def _is_of_now(self, view: View) -> bool:
        """Return whether its last reader was begun since the Buffer recovered; otherwise it has no readers."""
        return view.used_by is not None and view.used_by[0] == self._engine.generation

    def _given_for(self, origin: Origin, shape: Shape) -> View | None:
        return next((view for view in self._views[shape] if view.given_for == origin.number), None)

    def _unused(self, shape: Shape) -> View:
        """Return a view that no open combine reads: an unassigned one, a new one, or the one assigned earliest."""
        views, engine = self._views[shape], self._engine
        closed = [view for view in views if not self._is_read(view)]
        free = next((view for view in closed if view.given_for is None and view.event is None), None)
        if free is None and len(views) < engine.regions:
            free = View(self._new(shape))
            views.append(free)
        if free is None and closed:
            free = min(closed, key=lambda view: view.given_for is not None)
        if free is not None:
            views.append(views.pop(views.index(free)))  # keeps the views in the order of their last assignment
        if free is None:
            raise DeepEPError(
                f"rank {engine.rank}: get_next_low_latency_combine_buffer: the hooks of {len(views)} zero-copy "
                "combines have not been called yet; call one first, or make the Buffer with more regions"
            )
        return free
