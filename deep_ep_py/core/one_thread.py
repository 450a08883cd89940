"""Detection of a second thread that calls a Buffer while another thread is inside one of its calls."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

from deep_ep_py.errors import DeepEPError

_Method = TypeVar("_Method", bound=Callable[..., Any])


Occupancy = dict[str, tuple[int, str]]
"""Under "inside": the thread that is inside a call of a Buffer, and the call. Empty if there is none."""


def by_one_thread(method: _Method) -> _Method:
    """Make a method of an object with an `_occupancy` raise where another thread is inside such a method of it.

    Operations must begin in the same order on all ranks, so two threads that call at the same time are a mistake even
    where their calls would not disturb each other.
    """

    @wraps(method)
    def guarded(self: Any, *args: Any, **options: Any) -> Any:
        occupancy: Occupancy = self._occupancy
        mine = (threading.get_ident(), method.__name__)
        try:  # an interrupt may come after any line, and must not leave the Buffer occupied
            holder = occupancy.setdefault("inside", mine)
            if holder is not mine and holder[0] != mine[0]:  # of the same thread: for example in a signal handler
                self._engine.check_process()
                raise DeepEPError(f"{mine[1]}: {_described(holder)} of this Buffer, which serves one thread at a time")
            return method(self, *args, **options)
        finally:
            if occupancy.get("inside") is mine:
                occupancy.pop("inside", None)

    return cast("_Method", guarded)


def _described(holder: tuple[int, str]) -> str:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return f"thread {names.get(holder[0], holder[0])!r} is inside {holder[1]}"
