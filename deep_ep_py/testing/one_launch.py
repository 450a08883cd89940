"""Joint launches of ranks that are threads: their launches of a kernel become one."""

from __future__ import annotations

import threading
from typing import Any

from deep_ep_py.base.native import C


class OneLaunch:
    """The place where the ranks of `run_ranks(..., one_launch=True)` meet to launch.

    Parameters
    ----------
    ranks
        Number of ranks.
    """

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._lock = threading.Lock()
        self._gathering: Any = None
        self._left: list[int] = []

    def launcher(self, rank: int, timeout: float, context: Any, warps: int, copy_piece: int, cooperative: bool) -> Any:
        """Return the launcher of a rank.

        Parameters
        ----------
        rank
            The rank.
        timeout
            Seconds to wait for the others to launch the same kernel.
        context
            The GPU's context, a `native.C.cuda.Context`; that of the first rank is used for all.
        warps
            Warps per block; the value of the first rank is used.
        copy_piece
            Bytes of a row that a bulk copy moves; 0: rows are copied without.
        cooperative
            Whether launches are cooperative, which tells the driver that their blocks wait for each other; the value of
            the first rank is used.
        """
        with self._lock:
            if self._gathering is None:
                self._gathering = C.cuda.Gathering(context, self.ranks, warps, copy_piece, cooperative)
                for left in self._left:
                    self._gathering.leave(left)
            return C.cuda.GatheredLauncher(self._gathering, rank, timeout)

    def leave(self, rank: int) -> None:
        """Note that a rank's function has returned or raised, so that no other rank waits for its launches."""
        with self._lock:
            self._left.append(rank)
            if self._gathering is not None:
                self._gathering.leave(rank)
