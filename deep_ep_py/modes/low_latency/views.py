"""Memory that experts write their results to for combines that read them there."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from deep_ep_py.errors import DeepEPError
from deep_ep_py.modes.low_latency.handles import Origin

if TYPE_CHECKING:
    from deep_ep_py.session.engine import Engine

Shape = tuple[int, int, int]


@dataclass
class _View:
    memory: torch.Tensor
    given_for: int | None = None  # the number of the dispatch whose results it is for
    used_by: int | None = None  # the operation that reads it


class Views:
    """As many views of each shape as operations may be open. They are made when they are asked for, and kept.

    Parameters
    ----------
    engine : Engine
        Of the Buffer.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._views: dict[Shape, list[_View]] = defaultdict(list)

    def next_for(self, origin: Origin, shape: Shape) -> torch.Tensor:
        """Return the view for the next zero-copy combine of a dispatch's results; until then the same.

        Raises
        ------
        DeepEPError
            The combines of all views are still open.
        """
        view = self._given_for(origin, shape) or self._unused(shape)
        view.given_for = origin.number
        return view.memory

    def take(self, origin: Origin, shape: Shape) -> torch.Tensor:
        """Return the view for the combine that comes now, `used` says by which operation.

        Raises
        ------
        ValueError
            It was not asked for.
        """
        view = self._given_for(origin, shape)
        if view is None:
            raise ValueError("zero_copy=True: expected get_next_low_latency_combine_buffer(handle) to come first")
        return view.memory

    def used(self, origin: Origin, shape: Shape, operation: int) -> None:
        """Say which operation reads the view that was taken."""
        view = self._given_for(origin, shape)
        assert view is not None
        view.given_for, view.used_by = None, operation

    def _given_for(self, origin: Origin, shape: Shape) -> _View | None:
        return next((view for view in self._views[shape] if view.given_for == origin.number), None)

    def _unused(self, shape: Shape) -> _View:
        """Find one that no open combine reads: one that is for nothing, else a new one, else the first given away."""
        views, engine = self._views[shape], self._engine
        closed = [view for view in views if view.used_by is None or not engine.is_open(view.used_by)]
        free = next((view for view in closed if view.given_for is None), None)
        if free is None and len(views) < engine.regions:
            free = _View(engine.empty(shape, torch.bfloat16))
            views.append(free)
        if free is None and closed:
            free = closed[0]
            views.append(views.pop(views.index(free)))
        if free is None:
            raise DeepEPError(
                f"rank {engine.rank}: get_next_low_latency_combine_buffer: the hooks of {len(views)} zero-copy "
                "combines have not been called yet; call one first, or make the Buffer with more regions"
            )
        return free
