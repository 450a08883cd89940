"""A thread that runs a process's kernels on a CPU while no caller waits for them."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

from deep_ep_py.base.native import C

_EXIT_SECONDS = 5.0
"""How long an exiting process waits for calls whose peers may not arrive."""

_drivers: weakref.WeakSet[Driver] = weakref.WeakSet()


class Driver:
    """A thread that waits for calls one after the other; on a CPU, the waiting thread runs the kernels.

    It is started by the first call that is not waited for, or whose wait is long. While it is busy, it also makes the
    Buffer's other waits, so that an interrupt still reaches the caller and no two threads serve the same calls. It is a
    thread of the extension, not of Python, so kernels continue while another thread holds the GIL for long.

    Parameters
    ----------
    runtime : native.C.Runtime
        The runtime whose calls it waits for.
    give_up : callable
        Notifies the peers that this rank has stopped. Called if the process exits before all calls have ended.
    """

    def __init__(self, runtime: C.Runtime, give_up: Callable[[], None]) -> None:
        self._runner = C.Runner(runtime)
        self._give_up = weakref.WeakMethod(give_up)

    @property
    def busy(self) -> bool:
        """Whether it has work to do."""
        return not self._runner.rest(0)

    def drive(self, job: str, **what: Any) -> C.Run:
        """Start one of the runtime's waits, named by its method, on the thread."""
        _drivers.add(self)
        return self._runner.start(job, **what)

    def run(self, job: str, **what: Any) -> bool:
        """Make one of the runtime's waits: on the thread if it is busy or the wait is long, otherwise here.

        A long wait must check for Unix signals, which requires the GIL; the thread runs the kernels meanwhile. An
        interrupt ends the wait there, too.
        """
        _drivers.add(self)
        return self._runner.run(job, **what)

    def rest(self, seconds: float) -> bool:
        """Wait until it is idle, whatever the outcome of its waits. Returns whether it is."""
        return self._runner.rest(seconds)

    def end_with_process(self) -> None:
        """Wait for a while for calls in flight, then notify the peers that this rank has stopped."""
        give_up, rests = self._give_up(), False
        try:
            rests = self.rest(_EXIT_SECONDS)
        finally:  # an interrupt ends this wait, too
            if not rests and give_up is not None:
                with suppress(Exception):  # the runtime has failed, and there is no caller left to raise to
                    give_up()
        if not rests:
            self.rest(_EXIT_SECONDS)  # its kernels have been told to leave


def _end_all() -> None:
    with ExitStack() as stack:  # later drivers must end even if the wait of an earlier one is interrupted
        for driver in list(_drivers):
            stack.callback(driver.end_with_process)


# This runs before the interpreter ends its threads.
threading._register_atexit(_end_all)  # type: ignore[attr-defined]
# A forked child has none of the threads, and their work belongs to its parent.
os.register_at_fork(after_in_child=_drivers.clear)
