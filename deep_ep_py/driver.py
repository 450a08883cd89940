"""Runs a process's kernels on a CPU while nobody waits for them."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import Any

_EXIT_SECONDS = 5.0
"""How long a process that ends waits for calls whose peers may not come."""

_drivers: weakref.WeakSet[Driver] = weakref.WeakSet()


class Driver:
    """A thread that waits for calls one after the other: on a CPU whoever waits runs the kernels.

    It is started by the first call that is not waited for. While it is busy, the Buffer's other waits are made by it
    too: so an interrupt still reaches the caller, and nobody else looks after the same calls.

    Parameters
    ----------
    give_up : callable
        Tells the peers that this rank does not go on. Called when the process ends with calls that do not.
    """

    def __init__(self, give_up: Callable[[], None]) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._latest: Future[Any] | None = None
        self._give_up = weakref.WeakMethod(give_up)

    @property
    def busy(self) -> bool:
        """Whether it has something to do."""
        return self._latest is not None and not self._latest.done()

    def drive(self, job: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Have a job done, which waits for kernels."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="deep_ep_py")
            _drivers.add(self)
        self._latest = self._pool.submit(job, *arguments)
        return self._latest

    def run(self, job: Callable[..., Any], *arguments: Any) -> Any:
        """Do a job: in the thread if it is busy, else here."""
        return self.drive(job, *arguments).result() if self.busy else job(*arguments)

    def rest(self, seconds: float | None = None) -> bool:
        """Wait until it has nothing to do, whatever came of it; -> whether it has nothing."""
        if self._latest is not None:
            wait([self._latest], seconds)
        return not self.busy

    def stop(self) -> None:
        """Let the thread end when it has nothing to do."""
        if self._pool is not None:
            self._pool.shutdown(wait=False)

    def end_with_process(self) -> None:
        """Wait a while for what is on its way, then tell the peers that this rank is gone."""
        give_up = self._give_up()
        if not self.rest(_EXIT_SECONDS) and give_up is not None:
            with suppress(Exception):  # of a runtime that has come to grief: nobody is left to hear of it
                give_up()


def _end_all() -> None:
    for driver in list(_drivers):
        driver.end_with_process()


# Before the interpreter joins the threads of pools, which would wait for kernels as long as those do.
threading._register_atexit(_end_all)  # type: ignore[attr-defined]
# A forked child has none of the threads, and what they were at is its parent's.
os.register_at_fork(after_in_child=_drivers.clear)
