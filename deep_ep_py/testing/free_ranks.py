"""Ranks as threads of one process that run as they like: what `run_ranks` does on a GPU."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from deep_ep_py.core import choices
from deep_ep_py.device.hardware_queues import QUEUES, VARIABLE, provide_hardware_queues
from deep_ep_py.errors import DeepEPTimeout, PeerFailed
from deep_ep_py.testing.one_launch import OneLaunch


class FreeWorld:
    """Where ranks meet: what a `testing.ThreadGroup` asks of a world.

    Parameters
    ----------
    size
        How many there are.
    one_launch
        Where they launch together; None: each launches for itself.
    """

    def __init__(self, size: int, one_launch: OneLaunch | None = None) -> None:
        self.size = size
        self.one_launch = one_launch
        self.failed: int | None = None
        self._barrier = threading.Barrier(size)
        self._values: list[Any] = [None] * size

    def meet(self, rank: int, number: int, kind: str, value: Any) -> list[Any]:
        """Return what every rank has brought to its collective of this number."""
        try:
            self._values[rank] = value
            self._barrier.wait()
            values = list(self._values)
            self._barrier.wait()  # no rank brings its next value before all have read these
        except threading.BrokenBarrierError:
            assert self.failed is not None
            raise PeerFailed(self.failed, f"{kind}, collective {number}") from None
        return values

    def fail(self, rank: int) -> None:
        """Let no rank wait for one that will not come."""
        if self.failed is None:
            self.failed = rank
        self._barrier.abort()

    def leave(self, rank: int) -> None:
        """Let no rank wait to launch with one that has ended, well or not."""
        if self.one_launch is not None:
            self.one_launch.leave(rank)


def run_free(
    n: int, call: Callable[[FreeWorld, int], Any], one_launch: bool = False
) -> tuple[list[Any], dict[int, BaseException]]:
    """Run `call(world, rank)` on `n` threads at once, each with a stream of its own where there is a GPU.

    With `one_launch` their kernels share a stream beside, and go there together.

    Returns
    -------
    results : list
        By rank; None where it raised.
    errors : dict
        Exceptions by rank, in the order in which they were raised.

    Raises
    ------
    ValueError
        More ranks than a GPU has queues, without `one_launch`: some would wait for each other's kernels forever.
    """
    if n > QUEUES and not one_launch:
        raise ValueError(f"n={n}: expected at most {QUEUES} ranks on one GPU, its queues, or one_launch=True")
    provide_hardware_queues()
    world = FreeWorld(n, OneLaunch(n) if one_launch else None)
    results: list[Any] = [None] * n
    errors: dict[int, BaseException] = {}

    def body(rank: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()) if torch.cuda.is_available() else nullcontext():
                results[rank] = call(world, rank)
        except BaseException as error:  # noqa: B036 - handed to the caller of run_ranks
            errors[rank] = error
            world.fail(rank)
        finally:
            world.leave(rank)

    threads = [threading.Thread(target=body, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if n > 1 and not one_launch:
        _say_what_sharing_takes(n, errors)
    return results, errors


def _say_what_sharing_takes(ranks: int, errors: dict[int, BaseException]) -> None:
    """Where a rank has waited too long on a GPU that ranks share, its peer may be innocent."""
    for error in errors.values():
        if isinstance(error, DeepEPTimeout):
            add_note(
                error,
                f"{ranks} ranks share this GPU: kernels that it does not run side by side wait for each other, by "
                f"{choices.chosen(choices.LAUNCH)} launches ({choices.LAUNCH}) and {VARIABLE}="
                f"{os.environ.get(VARIABLE)}, of use only if set before CUDA is; `python -m deep_ep_py canary` looks",
            )


def add_note(error: BaseException, note: str) -> None:
    """Add what an exception is printed with."""
    if hasattr(error, "add_note"):
        error.add_note(note)
    else:  # Python 3.10, where nothing prints them
        error.__notes__ = [*getattr(error, "__notes__", []), note]  # type: ignore[attr-defined]
