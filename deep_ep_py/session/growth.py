"""Heaps that grow: how a rank's new memory for outputs becomes what its peers can reach (P10).

An output that finds no room makes its rank's heap grow, and goes in rounds. What has been added is handed to the peers
before the rank's next notify, which announces it; they map it when they have that operation's counts, before they
launch its dispatch. So from that operation on the rank may offer outputs there. No rank waits for another in this: what
is handed over lies in a socket until it is announced.

That operation must come at the same place in the order in which each rank finishes operations: all finish theirs in one
order. Else a peer could launch what reads an offer of a later operation before it has mapped where that lies. A call
begins and finishes at once; `Buffer._begin_dispatch` demands the order of its callers, and nothing checks it.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from deep_ep_py.bootstrap.connections import Connections
from deep_ep_py.core.native import C
from deep_ep_py.errors import CudaError, DeepEPError

if TYPE_CHECKING:
    from deep_ep_py.bootstrap.groups import Bootstrap

_log = logging.getLogger("deep_ep_py")


class Growth:
    """One rank's part in it. Heaps that do not grow have no pieces, and nothing is done.

    Parameters
    ----------
    bootstrap : Bootstrap
        The ranks, as `connect` has returned them. Inside one process they share the heaps themselves.
    runtime : native.C.Runtime
        Whose heap's first piece all ranks have mapped.

    Attributes
    ----------
    helps : bool
        Whether outputs that find no room should make the heap grow: whether the Buffer's latest dispatch with counts
        was one whose host waits for them. Its next one will announce what has been added, so that combines and cached
        dispatches have it too. Where no such dispatch comes, as with `num_worst_tokens` alone, peers would never learn
        of it.
    """

    def __init__(self, bootstrap: Bootstrap, runtime: C.Runtime) -> None:
        self._rank = bootstrap.rank
        self._connections = bootstrap if isinstance(bootstrap, Connections) else None
        self._handed = int(runtime.mapped(self._rank))
        self._warned = False
        self.helps = False

    def announce(self, runtime: C.Runtime, host_waits: bool) -> None:
        """Hand over what has been added to this rank's heap: the next notify announces it, if hosts wait for it."""
        self.helps = host_waits
        for offset, size in runtime.added_pieces():
            if offset < self._handed:
                continue
            if self._connections is not None and not self._hand_over(runtime, offset, size):
                break
            self._handed = offset + size
        runtime.announce(self._handed)

    def _hand_over(self, runtime: C.Runtime, offset: int, size: int) -> bool:
        assert self._connections is not None
        try:
            descriptor = runtime.export_piece(offset, size)
        except CudaError as error:  # too many open files, say: outputs go in rounds until it can be done
            if not self._warned:
                _log.warning("rank %d: more memory for outputs cannot be shared for now: %s", self._rank, error)
            self._warned = True
            return False
        try:
            return self._connections.hand_over((offset, size), descriptor)
        finally:
            os.close(descriptor)

    def follow(self, runtime: C.Runtime, call: C.Call) -> None:
        """Map what the peers have announced with a dispatch, whose counts are there; then outputs may lie in what this
        rank has announced.

        Raises
        ------
        DeepEPError
            If a peer's memory cannot be mapped: that rank's rows would have nowhere to go.
        """
        for rank, announced in runtime.behind(call):
            while runtime.mapped(rank) < announced:
                self._map_next(runtime, rank)
        runtime.share(call)

    def _map_next(self, runtime: C.Runtime, rank: int) -> None:
        assert self._connections is not None, "ranks of one process share their heaps"
        (offset, size), descriptor = self._connections.next_piece(rank)
        try:
            runtime.map_piece(rank, offset, size, descriptor)
        except CudaError as error:
            what = f"{size} more bytes of rank {rank}'s memory for outputs"
            raise DeepEPError(f"rank {self._rank}: {what} cannot be mapped: {error}") from error
        self._connections.drop_piece(rank)
