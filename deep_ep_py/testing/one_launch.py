"""Ranks that are threads and go to the GPU together: their launches of a kernel are one."""

from __future__ import annotations

import threading
from typing import Any

from deep_ep_py.core.native import C


class OneLaunch:
    """Where the ranks of `run_ranks(..., one_launch=True)` meet to launch.

    Parameters
    ----------
    ranks
        How many there are.
    """

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._lock = threading.Lock()
        self._gathering: Any = None
        self._left: list[int] = []

    def launcher(
        self, rank: int, timeout: float, context: Any, warps: int, bulk_copies: bool, cooperative: bool
    ) -> Any:
        """Return what a rank launches with.

        Parameters
        ----------
        rank
            The rank.
        timeout
            Seconds that it waits for the others to launch the same.
        context
            The GPU's, a `native.C.cuda.Context`; the first rank's serves all.
        warps
            Per block; the first rank's count.
        bulk_copies
            Whether the kernels copy rows by bulk copies.
        cooperative
            Whether the driver is told that a launch's blocks wait for each other; the first rank's word.
        """
        with self._lock:
            if self._gathering is None:
                self._gathering = C.cuda.Gathering(context, self.ranks, warps, bulk_copies, cooperative)
                for left in self._left:
                    self._gathering.leave(left)
            return C.cuda.GatheredLauncher(self._gathering, rank, timeout)

    def leave(self, rank: int) -> None:
        """Note that a rank's function has returned or raised, so that no other rank waits for its launches."""
        with self._lock:
            self._left.append(rank)
            if self._gathering is not None:
                self._gathering.leave(rank)
