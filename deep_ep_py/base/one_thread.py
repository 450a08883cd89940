"""What becomes of a second thread that calls a Buffer while another thread is inside one of its calls."""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar, cast

from deep_ep_py.base.not_compiled import not_compiled
from deep_ep_py.errors import DeepEPError

_LOOK_SECONDS = 0.001
_EXIT_SECONDS = 5.0
"""How long an exiting process waits for other threads' calls, before it breaks them off and after that."""
_Method = TypeVar("_Method", bound=Callable[..., Any])


Occupancy = dict[str, tuple[int, str]]
"""Under "inside": the thread that is inside a call of a Buffer, and the call. Empty if there is none."""


_calls: dict[tuple[int, str], Any] = {}
"""The calls that threads are inside, as in `Occupancy`, and the engines of their Buffers."""
_exits = threading.Event()


def by_one_thread(method: _Method) -> _Method:
    """Make a method of an object with an `_engine` raise where another thread is inside such a method of its Buffer.

    Operations must begin in the same order on all ranks, so two threads that call at the same time are a mistake even
    where their calls would not disturb each other. Such a method is not compiled either.
    """

    @wraps(method)
    def guarded(self: Any, *args: Any, **options: Any) -> Any:
        occupancy: Occupancy = self._engine.occupancy
        mine = (threading.get_ident(), method.__name__)
        try:  # an interrupt may come after any line, and must not leave the Buffer occupied
            holder = occupancy.setdefault("inside", mine)
            if holder is mine:
                _calls[mine] = self._engine
                if _exits.is_set() and mine[0] != threading.main_thread().ident:
                    raise DeepEPError(f"{mine[1]}: the process exits")
            if holder is not mine and holder[0] != mine[0]:  # of the same thread: for example in a signal handler
                self._engine.check_process()
                raise DeepEPError(f"{mine[1]}: {_described(holder)} of this Buffer, which serves one thread at a time")
            return method(self, *args, **options)
        finally:
            if occupancy.get("inside") is mine:
                occupancy.pop("inside", None)
                _calls.pop(mine, None)

    return cast("_Method", not_compiled(guarded))


@contextmanager
def after_other_threads(occupancy: Occupancy, name: str) -> Iterator[None]:
    """Be inside a call that ends or renews what other calls use: wait until another thread's call has ended.

    That is at the Buffer's timeout at the latest.
    """
    mine = (threading.get_ident(), name)
    try:
        while (holder := occupancy.setdefault("inside", mine)) is not mine:
            if holder[0] == mine[0]:  # a signal handler: the call goes on after it
                raise DeepEPError(f"{name}: this thread is inside {holder[1]} of this Buffer")
            time.sleep(_LOOK_SECONDS)
        yield
    finally:
        if occupancy.get("inside") is mine:
            occupancy.pop("inside", None)


def _described(holder: tuple[int, str]) -> str:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return f"thread {names.get(holder[0], holder[0])!r} is inside {holder[1]}"


def _end_calls() -> None:
    """Wait for the calls of daemon threads: Python is about to end these, which aborts the process in native code."""
    _exits.set()
    for breaks_off in (False, True):
        until = time.monotonic() + _EXIT_SECONDS
        while (calls := _of_others()) and time.monotonic() < until:
            if breaks_off:
                for call, engine in calls:
                    engine.break_off(f"the process exits while {_described(call)}")
            time.sleep(_LOOK_SECONDS)


def _of_others() -> list[tuple[tuple[int, str], Any]]:
    return [(call, engine) for call, engine in tuple(_calls.items()) if call[0] != threading.get_ident()]


# This runs after all other threads have ended, and before the interpreter ends daemon threads.
atexit.register(_end_calls)
# A forked child has none of the other threads.
os.register_at_fork(after_in_child=_calls.clear)
