"""Growth of heaps: how a rank's additional memory for outputs becomes reachable for its peers (P10).

An output that finds no room makes its rank's heap grow, and its rows go in rounds. The rank hands the added memory to
its peers before its next notify kernel, which announces it. They map it once they have the counts of that operation,
before they launch its dispatch. From that operation on, the rank may offer outputs there. No rank waits for another: a
handed-over descriptor stays in a socket until it is announced.

All ranks must finish operations in the same order. Otherwise a peer could launch a kernel that reads the offer of a
later operation before it has mapped the memory of that offer. A call begins and finishes at once;
`Buffer._begin_dispatch` requires the order from its callers, and nothing checks it.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from deep_ep_py.base.native import C
from deep_ep_py.errors import CudaError, DeepEPError
from deep_ep_py.transport.bootstrap.connections import Connections

if TYPE_CHECKING:
    from deep_ep_py.transport.bootstrap.groups import Bootstrap

_log = logging.getLogger("deep_ep_py")


class Growth:
    """One rank's part in the growth of heaps. Heaps that do not grow have no pieces, so nothing is done for them.

    Parameters
    ----------
    bootstrap : Bootstrap
        The ranks, as returned by `connect`. Ranks of one process share the heaps themselves.
    runtime : native.C.Runtime
        The runtime; all ranks have mapped the first piece of its heap.

    Attributes
    ----------
    helps : bool
        Whether outputs that find no room should make the heap grow. True if the host waited for the counts of the
        Buffer's latest dispatch with counts: its next one will then announce the added memory, so that combines and
        cached dispatches can use it too. If no such dispatch follows, as with `num_worst_tokens` alone, peers would
        never learn of it.
    """

    def __init__(self, bootstrap: Bootstrap, runtime: C.Runtime) -> None:
        self._rank = bootstrap.rank
        self._connections = bootstrap if isinstance(bootstrap, Connections) else None
        self._handed = int(runtime.mapped(self._rank))
        self._warned = False
        self.helps = False

    def announce(self, runtime: C.Runtime, host_waits: bool) -> None:
        """Hand over the memory added to this rank's heap; the next notify announces it if hosts wait for the counts."""
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
        except CudaError as error:  # for example too many open files: outputs go in rounds until it succeeds
            if not self._warned:
                _log.warning("rank %d: more memory for outputs cannot be shared for now: %s", self._rank, error)
            self._warned = True
            return False
        try:
            return self._connections.hand_over((offset, size), descriptor)
        finally:
            os.close(descriptor)

    def follow(self, runtime: C.Runtime, call: C.Call) -> None:
        """Map the memory that peers have announced with a dispatch whose counts have arrived.

        From then on, outputs may be placed in the memory that this rank has announced.

        Raises
        ------
        DeepEPError
            A peer's memory cannot be mapped, so rows for that rank would have nowhere to go.
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
