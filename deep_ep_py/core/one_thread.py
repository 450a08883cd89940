"""Detection of a second thread that calls a Buffer while another thread is inside one of its calls."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

from deep_ep_py.errors import DeepEPError

_Method = TypeVar("_Method", bound=Callable[..., Any])


class Occupancy:
    """Which thread is inside a call of a Buffer, and in which one."""

    __slots__ = ("call", "lock", "thread")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.thread, self.call = 0, ""


def by_one_thread(method: _Method) -> _Method:
    """Make a method of an object with an `_occupancy` raise where another thread is inside such a method of it.

    Operations must begin in the same order on all ranks, so two threads that call at the same time are a mistake even
    where their calls would not disturb each other.
    """

    @wraps(method)
    def guarded(self: Any, *args: Any, **options: Any) -> Any:
        occupancy: Occupancy = self._occupancy
        if not occupancy.lock.acquire(blocking=False):
            if occupancy.thread == threading.get_ident():  # for example in a signal handler
                return method(self, *args, **options)
            names = {thread.ident: thread.name for thread in threading.enumerate()}
            inside = f"thread {names.get(occupancy.thread, occupancy.thread)!r} is inside {occupancy.call}"
            raise DeepEPError(f"{method.__name__}: {inside} of this Buffer, which serves one thread at a time")
        occupancy.thread, occupancy.call = threading.get_ident(), method.__name__
        try:
            return method(self, *args, **options)
        finally:
            occupancy.lock.release()

    return cast("_Method", guarded)
