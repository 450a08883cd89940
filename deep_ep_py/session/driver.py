"""Runs a process's kernels on a CPU while no caller waits for them."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

from deep_ep_py.core.native import C

_EXIT_SECONDS = 5.0
"""How long a process that ends waits for calls whose peers may not come."""

_drivers: weakref.WeakSet[Driver] = weakref.WeakSet()


class Driver:
    """A thread that waits for calls one after the other: on a CPU the thread that waits runs the kernels.

    It is started by the first call that is not waited for, or for long. While it is busy, the Buffer's other waits are
    made by it too: so an interrupt still reaches the caller, and no two threads look after the same calls. It is a
    thread of the extension's, not of Python's: kernels go on while some other thread holds the GIL for long.

    Parameters
    ----------
    runtime : native.C.Runtime
        What it waits for.
    give_up : callable
        Tells the peers that this rank does not go on. Called when the process ends with calls that do not.
    """

    def __init__(self, runtime: C.Runtime, give_up: Callable[[], None]) -> None:
        self._runner = C.Runner(runtime)
        self._give_up = weakref.WeakMethod(give_up)

    @property
    def busy(self) -> bool:
        """Whether it has something to do."""
        return not self._runner.rest(0)

    def drive(self, job: str, **what: Any) -> C.Run:
        """Have one of the runtime's waits done, named by its method."""
        _drivers.add(self)
        return self._runner.start(job, **what)

    def run(self, job: str, **what: Any) -> bool:
        """Do one of the runtime's waits: in the thread if it is busy or the wait is long, else here.

        A long one has to look at signals, for which it needs the GIL. The thread runs the kernels meanwhile. An
        interrupt ends the wait there, too.
        """
        _drivers.add(self)
        return self._runner.run(job, **what)

    def rest(self, seconds: float) -> bool:
        """Wait until it has nothing to do, whatever came of it; -> whether it has nothing."""
        return self._runner.rest(seconds)

    def end_with_process(self) -> None:
        """Wait a while for what is on its way, then tell the peers that this rank is gone."""
        give_up, rests = self._give_up(), False
        try:
            rests = self.rest(_EXIT_SECONDS)
        finally:  # an interrupt ends this wait, too
            if not rests and give_up is not None:
                with suppress(Exception):  # of a runtime that has failed: there is no caller left to be told
                    give_up()
        if not rests:
            self.rest(_EXIT_SECONDS)  # its kernels have been told to leave


def _end_all() -> None:
    with ExitStack() as stack:  # also those behind one whose wait is interrupted
        for driver in list(_drivers):
            stack.callback(driver.end_with_process)


# Before the interpreter ends its threads.
threading._register_atexit(_end_all)  # type: ignore[attr-defined]
# A forked child has none of the threads, and what they were at is its parent's.
os.register_at_fork(after_in_child=_drivers.clear)
