"""Whose operations a handle may serve: the ranks of a Buffer, and a number that tells it from their others."""

from __future__ import annotations

import os
import secrets
import threading
from dataclasses import dataclass

from deep_ep_py.bootstrap.groups import Bootstrap, ThreadBootstrap

_PROCESS = secrets.token_hex(16)
"""Numbers of processes are given again, and containers number their own."""
_lock = threading.Lock()
_latest = 0
"""The highest number of a Buffer that this process has taken part in."""


@dataclass(frozen=True)
class Membership:
    """The identity of a Buffer's ranks.

    Attributes
    ----------
    number : int
        The same on all ranks. Any two Buffers that have a rank in common have different ones, the later the higher.
    members : tuple of str
        By rank: a name that only this process has, or, where ranks are threads, only this one.
    """

    number: int
    members: tuple[str, ...]

    @staticmethod
    def agree(bootstrap: Bootstrap, name: str) -> Membership:
        """Exchange names and agree on a number. Collective.

        Parameters
        ----------
        bootstrap : Bootstrap
            The ranks.
        name : str
            The caller's, from `name_of`.
        """
        global _latest
        with _lock:
            proposed = _latest + 1
        told = bootstrap.all_gather([name, proposed])
        # Each rank proposes more than it has seen, so the highest is new to all of them.
        number = max(int(theirs) for _, theirs in told)
        with _lock:
            _latest = max(_latest, number)
        return Membership(number, tuple(str(one) for one, _ in told))


def name_of(bootstrap: Bootstrap) -> str:
    """Return a name that the calling rank keeps from Buffer to Buffer, and that no other has."""
    process = f"{_PROCESS}-{os.getpid()}"  # a forked child is another process
    return f"{process}-{bootstrap.group.group_name}" if isinstance(bootstrap, ThreadBootstrap) else process
