"""Failures of one rank, raised on all ranks: the others would otherwise wait for it until they time out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from deep_ep_py.errors import DeepEPError

_MAX_TEXT = 4096
"""Characters of a failure that the other ranks are told."""
T = TypeVar("T")
Told = tuple[str, bool]
"""What ranks exchange about a failure: its text, empty if there is none, and whether an argument is to blame."""


def attempt(do: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Call a function, and return its result or the exception that it raises."""
    try:
        return do(), None
    except Exception as error:
        return None, error


def told_of(failed: BaseException | None) -> Told:
    """Return what the other ranks are told."""
    if failed is None:
        return "", False
    return (str(failed) or repr(failed))[:_MAX_TEXT], isinstance(failed, TypeError | ValueError)


def raise_together(rank: int, failed: Exception | None, told: Sequence[Told]) -> None:
    """Raise if any rank has failed.

    Parameters
    ----------
    rank : int
        The calling rank.
    failed : Exception, optional
        Its own failure.
    told : sequence of Told
        What each rank has told, by rank.

    Raises
    ------
    Exception
        `failed`; if this rank has not failed, the message of the first rank that has, as a ValueError if an argument is
        to blame and as a DeepEPError otherwise.
    """
    if failed is not None:
        raise failed
    for other, (why, by_argument) in enumerate(told):
        if why and other != rank:
            raise (ValueError if by_argument else DeepEPError)(f"rank {other}: {why}")
