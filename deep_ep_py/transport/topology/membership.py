"""The identity of a Buffer, which decides whether it accepts a handle: its ranks, and a number unique among theirs."""

from __future__ import annotations

import os
import secrets
import threading
from dataclasses import dataclass

from deep_ep_py.transport.bootstrap.groups import Bootstrap, ThreadBootstrap

_PROCESS = secrets.token_hex(16)
"""Identifies this process: pids are reused, and containers number their own."""
_lock = threading.Lock()
_latest = 0
"""The highest number of the Buffers that this process has taken part in."""


@dataclass(frozen=True)
class Membership:
    """The identity of a Buffer's ranks.

    Attributes
    ----------
    number : int
        The same on all ranks. Two Buffers that share a rank have different numbers; the later one has the higher.
    members : tuple of str
        By rank: a name unique to its process, or to the rank if ranks are threads.
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
            The caller's name, from `name_of`.
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
    """Return a unique name that the calling rank keeps from Buffer to Buffer."""
    process = f"{_PROCESS}-{os.getpid()}"  # a forked child is another process
    return f"{process}-{bootstrap.group.group_name}" if isinstance(bootstrap, ThreadBootstrap) else process
