"""What one rank fails of is raised on all: the others would wait for it in vain."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from deep_ep_py.errors import DeepEPError

T = TypeVar("T")
Told = tuple[str, bool]
"""What ranks exchange of a failure: its text, empty where there is none; and whether an argument is to blame."""


def attempt(do: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Return what a function returns, or what it raises."""
    try:
        return do(), None
    except Exception as error:
        return None, error


def told_of(failed: Exception | None) -> Told:
    """Return what others are told."""
    if failed is None:
        return "", False
    return str(failed) or repr(failed), isinstance(failed, TypeError | ValueError)


def raise_together(rank: int, failed: Exception | None, told: Sequence[Told]) -> None:
    """Raise where any rank has failed.

    Parameters
    ----------
    rank : int
        This one.
    failed : Exception, optional
        What it has failed of.
    told : sequence of Told
        By rank.

    Raises
    ------
    Exception
        `failed`; where this rank has not failed, a ValueError with what the first that has says, or a DeepEPError where
        that is not of an argument.
    """
    if failed is not None:
        raise failed
    for other, (why, by_argument) in enumerate(told):
        if why and other != rank:
            raise (ValueError if by_argument else DeepEPError)(f"rank {other}: {why}")
