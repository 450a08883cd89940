"""Runs a process's kernels on a CPU while nobody waits for them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


class Driver:
    """A thread that waits for calls one after the other: on a CPU whoever waits runs the kernels.

    It is started by the first call that is not waited for. While it is busy other waits go through it, so that one
    thread alone looks after a Buffer.
    """

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._latest: Future[None] | None = None

    def drive(self, wait: Callable[[Any], None], call: Any) -> None:
        """Have `wait(call)` run to its end."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="deep_ep_py")
        self._latest = self._pool.submit(wait, call)

    def wait(self, wait: Callable[[Any], None], call: Any) -> bool:
        """Wait in it if it is busy, or return False."""
        if self._latest is None or self._latest.done():
            return False
        self.drive(wait, call)
        self._latest.result()
        return True

    def stop(self, settled: bool) -> None:
        """Let the thread end; wait for that where all kernels have."""
        if self._pool is not None:
            self._pool.shutdown(wait=settled)
