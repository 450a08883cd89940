"""Ranks as threads of one process that run as they like: what `run_ranks` does on a GPU."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from .errors import PeerFailed


class FreeWorld:
    """Where ranks meet: what a `testing.ThreadGroup` asks of a world.

    Parameters
    ----------
    size
        How many there are.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.failed: int | None = None
        self._barrier = threading.Barrier(size)
        self._values: list[Any] = [None] * size

    def meet(self, rank: int, number: int, kind: str, value: Any) -> list[Any]:
        """Return what every rank has brought to its collective of this number."""
        try:
            self._values[rank] = value
            self._barrier.wait()
            values = list(self._values)
            self._barrier.wait()  # nobody brings the next before all have looked
        except threading.BrokenBarrierError:
            assert self.failed is not None
            raise PeerFailed(self.failed, f"{kind}, collective {number}") from None
        return values

    def fail(self, rank: int) -> None:
        """Let nobody wait for a rank that will not come."""
        if self.failed is None:
            self.failed = rank
        self._barrier.abort()


def run_free(n: int, call: Callable[[FreeWorld, int], Any]) -> tuple[list[Any], dict[int, BaseException]]:
    """Run `call(world, rank)` on `n` threads at once.

    Returns
    -------
    results : list
        By rank; None where it raised.
    errors : dict
        Exceptions by rank, in the order in which they were raised.
    """
    world = FreeWorld(n)
    results: list[Any] = [None] * n
    errors: dict[int, BaseException] = {}

    def body(rank: int) -> None:
        try:
            results[rank] = call(world, rank)
        except BaseException as error:  # noqa: B036 - handed to the caller of run_ranks
            errors[rank] = error
            world.fail(rank)

    threads = [threading.Thread(target=body, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results, errors
