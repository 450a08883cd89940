"""Ranks as threads of one process that run as they like: what `run_ranks` does on a GPU."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from .errors import PeerFailed


class FreeGroup:
    """The process group of such ranks; as `testing.ThreadGroup`, but nobody schedules it.

    Parameters
    ----------
    meeting
        What all ranks share.
    rank
        The caller's.
    """

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting, self._rank = meeting, rank

    def rank(self) -> int:
        """Return the caller's rank."""
        return self._rank

    def size(self) -> int:
        """Return the number of ranks."""
        return self._meeting.barrier.parties

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Return every rank's object, by rank. Objects are passed by reference."""
        return self._meeting.gather(self._rank, obj)

    def broadcast_object(self, obj: Any, src: int = 0) -> Any:
        """Return the object of rank `src`."""
        return self._meeting.gather(self._rank, obj)[src]

    def barrier(self) -> None:
        """Return when all ranks have called it."""
        self._meeting.gather(self._rank, None)


class Meeting:
    """Where ranks meet.

    Parameters
    ----------
    size
        How many there are.
    """

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.failed: int | None = None
        self._values: list[Any] = [None] * size

    def gather(self, rank: int, value: Any) -> list[Any]:
        """Return what every rank has brought."""
        try:
            self._values[rank] = value
            self.barrier.wait()
            values = list(self._values)
            self.barrier.wait()  # nobody brings the next before all have looked
        except threading.BrokenBarrierError:
            assert self.failed is not None
            raise PeerFailed(self.failed, "a collective") from None
        return values

    def fail(self, rank: int) -> None:
        """Let nobody wait for a rank that will not come."""
        if self.failed is None:
            self.failed = rank
        self.barrier.abort()


def run_free(n: int, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[list[Any], dict[int, BaseException]]:
    """Run `fn(group, *args, **kwargs)` on `n` threads at once.

    Returns
    -------
    results : list
        By rank; None where it raised.
    errors : dict
        Exceptions by rank, in the order in which they were raised.
    """
    meeting = Meeting(n)
    results: list[Any] = [None] * n
    errors: dict[int, BaseException] = {}

    def body(rank: int) -> None:
        try:
            results[rank] = fn(FreeGroup(meeting, rank), *args, **kwargs)
        except BaseException as error:  # noqa: B036 - handed to the caller of run_ranks
            errors[rank] = error
            meeting.fail(rank)

    threads = [threading.Thread(target=body, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results, errors
