"""Ranks as threads of one process that run freely, for `run_ranks` on a GPU."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from deep_ep_py.base import choices
from deep_ep_py.device.hardware_queues import QUEUES, VARIABLE, provide_hardware_queues
from deep_ep_py.errors import DeepEPTimeout, PeerFailed
from deep_ep_py.testing.one_launch import OneLaunch
from deep_ep_py.testing.ready_copies import ReadyCopies


class FreeWorld:
    """The world behind a `testing.ThreadGroup`, in which ranks meet.

    Parameters
    ----------
    size
        Number of ranks.
    one_launch
        Where the ranks launch together; None: each launches its own kernels.
    """

    def __init__(self, size: int, one_launch: OneLaunch | None = None) -> None:
        self.size = size
        self.one_launch = one_launch
        self.failed: int | None = None
        self._barrier = threading.Barrier(size)
        self._values: list[Any] = [None] * size

    def meet(self, rank: int, number: int, kind: str, value: Any) -> list[Any]:
        """Return the values that all ranks have passed to the collective with this number."""
        try:
            self._values[rank] = value
            self._barrier.wait()
            values = list(self._values)
            self._barrier.wait()  # no rank writes its next value before all have read these
        except threading.BrokenBarrierError:
            assert self.failed is not None
            raise PeerFailed(self.failed, f"{kind}, collective {number}") from None
        return values

    def fail(self, rank: int) -> None:
        """Keep the other ranks from waiting for a rank that has failed."""
        if self.failed is None:
            self.failed = rank
        self._barrier.abort()

    def leave(self, rank: int) -> None:
        """Keep the other ranks from waiting for launches of a rank that has ended, whether or not it failed."""
        if self.one_launch is not None:
            self.one_launch.leave(rank)


def run_free(
    n: int, call: Callable[[FreeWorld, int], Any], one_launch: bool = False
) -> tuple[list[Any], dict[int, BaseException]]:
    """Run `call(world, rank)` on `n` threads at once, each with a stream of its own if there is a GPU.

    With `one_launch`, their kernels are launched together on an additional, shared stream.

    Returns
    -------
    results : list
        Results by rank; None for a rank that raised.
    errors : dict
        Exceptions by rank, in the order in which they were raised.

    Raises
    ------
    ValueError
        There are more ranks than the GPU has hardware queues, without `one_launch`: some would wait for each other's
        kernels forever.
    """
    if n > QUEUES and not one_launch:
        raise ValueError(
            f"n={n}: expected at most {QUEUES} ranks on one GPU, its number of hardware queues, or one_launch=True"
        )
    provide_hardware_queues()
    world = FreeWorld(n, OneLaunch(n) if one_launch else None)
    results: list[Any] = [None] * n
    errors: dict[int, BaseException] = {}

    def body(rank: int) -> None:
        try:
            with ExitStack() as contexts:
                if torch.cuda.is_available():
                    contexts.enter_context(torch.cuda.stream(torch.cuda.Stream()))
                    if n > 1 and not one_launch:
                        contexts.enter_context(ReadyCopies())
                results[rank] = call(world, rank)
        except BaseException as error:  # noqa: B036 - handed to the caller of run_ranks
            errors[rank] = error
            world.fail(rank)
        finally:
            world.leave(rank)

    threads = [threading.Thread(target=body, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(n)]
    with _nothing_is_collected():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if n > 1 and not one_launch:
        _say_what_sharing_takes(n, errors)
    return results, errors


class _Collecting:
    """Whether garbage is collected while several `run_free` run at once."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.kept_off, self.enabled = 0, True


_collecting = _Collecting()


@contextmanager
def _nothing_is_collected() -> Iterator[None]:
    """Collect garbage now, and none on the threads of the ranks.

    To free an old Buffer, the driver waits for all kernels of the GPU. On the thread of a rank, that could be kernels
    that wait for the rank's own next launch.
    """
    gc.collect()
    with _collecting.lock:
        if _collecting.kept_off == 0:
            _collecting.enabled = gc.isenabled()
            gc.disable()
        _collecting.kept_off += 1
    try:
        yield
    finally:
        with _collecting.lock:
            _collecting.kept_off -= 1
            if _collecting.kept_off == 0 and _collecting.enabled:
                gc.enable()


def _say_what_sharing_takes(ranks: int, errors: dict[int, BaseException]) -> None:
    """Add a note to timeouts on a GPU that ranks share, since the peer may not be the cause."""
    for error in errors.values():
        if isinstance(error, DeepEPTimeout):
            add_note(
                error,
                f"{ranks} ranks share this GPU: kernels that it does not run side by side wait for each other, here "
                f"with {choices.chosen(choices.LAUNCH)} launches ({choices.LAUNCH}) and {VARIABLE}="
                f"{os.environ.get(VARIABLE)}, which works only if set before CUDA starts; "
                "`python -m deep_ep_py canary` checks this",
            )


def add_note(error: BaseException, note: str) -> None:
    """Add a note that is printed with an exception."""
    if hasattr(error, "add_note"):
        error.add_note(note)
    else:  # Python 3.10, which does not print notes
        error.__notes__ = [*getattr(error, "__notes__", []), note]  # type: ignore[attr-defined]
