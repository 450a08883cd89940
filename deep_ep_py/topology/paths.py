"""The ways to another rank, each of which says itself whether it leads there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

from deep_ep_py.core.native import C
from deep_ep_py.topology.gpus import Apart

if TYPE_CHECKING:
    from deep_ep_py.nvshmem.memory import NvshmemMemory

PEER, IBGDA, PROXY, WEAK, MIXED = "peer", "ibgda", "proxy", "weak", "mixed"


@dataclass(frozen=True)
class Places:
    """Where the ranks of a Buffer are, as one of them sees it.

    Attributes
    ----------
    rank : int
        The one that sees it.
    machines : tuple of int
        By rank: which machine it is on.
    ranks_per_node : int
        Neighbours in number share a node.
    in_process : bool
        Whether all ranks are threads of this process.
    provider : str
        Of libfabric, that the proxy is to take; empty: the best there is.
    address : str
        At which other machines reach this one; empty where all ranks are on one.
    symmetric : NvshmemMemory, optional
        Where heaps lie. None: in memory of their own.
    apart : Apart
        Ranks whose GPUs do not use each other's memory.
    """

    rank: int
    machines: tuple[int, ...]
    ranks_per_node: int
    in_process: bool = True
    provider: str = ""
    address: str = ""
    symmetric: NvshmemMemory | None = None
    apart: Apart = field(default_factory=Apart)

    def is_near(self, peer: int) -> bool:
        """Whether a rank is on this machine."""
        return self.machines[peer] == self.machines[self.rank]

    def shares_node(self, peer: int) -> bool:
        """Whether a rank is on this node, which is a part of a machine."""
        return self.is_near(peer) and peer // self.ranks_per_node == self.rank // self.ranks_per_node


class Path(Protocol):
    """A way to other ranks.

    Attributes
    ----------
    name : str
        Of the route: "peer", or a fabric of csrc/fabric/registry.h.
    mutual : bool
        Whether the ranks that it reaches all reach this one by it: then they need not be asked.
    """

    name: str
    mutual: bool

    def refusal(self, peer: int) -> str:
        """Return why it does not reach a rank, to be read behind the path's name; empty: it does."""


@dataclass(frozen=True)
class PeerPath:
    """Loads and stores, among the ranks of a node."""

    places: Places
    name = PEER
    mutual = True

    def refusal(self, peer: int) -> str:
        """See `Path`."""
        if not self.places.is_near(peer):
            return "it is on another machine, which shares no memory"
        if not self.places.shares_node(peer):
            count = self.places.ranks_per_node
            return f"it is on another node, {'each rank is one' if count == 1 else f'of {count} ranks'} here"
        return self.places.apart.reason(self.places.rank, peer)


@dataclass(frozen=True)
class EvenPeerPath:
    """The same for every other pair of ranks: for tests, in which the fabric "mixed" leaves the rest to "weak"."""

    places: Places
    name = PEER
    mutual = True

    def refusal(self, peer: int) -> str:
        """See `Path`."""
        if (self.places.rank + peer) % 2:
            return "their numbers' sum is odd"
        return PeerPath(self.places).refusal(peer)


@dataclass(frozen=True)
class _PathOfMachine:
    """What works in memory that the ranks of a machine share, also those of different nodes."""

    places: Places
    name = ""
    mutual = True
    _elsewhere = "it reaches its own machine alone"

    def refusal(self, peer: int) -> str:
        """See `Path`."""
        return "" if self.places.is_near(peer) else self._elsewhere


class IbgdaPath(_PathOfMachine):
    """Work requests that kernels write for software NICs."""

    name = IBGDA
    _elsewhere = "software NICs reach their own machine alone"


class WeakPath(_PathOfMachine):
    """An agent that delays, cuts and reorders, for tests: it copies from memory to memory."""

    name = WEAK


@dataclass(frozen=True)
class NvshmemPath:
    """Work requests that kernels write for real NICs, by queue pairs of NVSHMEM's, which the other PE may lack."""

    symmetric: NvshmemMemory
    name = IBGDA
    mutual = False

    def refusal(self, peer: int) -> str:
        """See `Path`."""
        return self.symmetric.refusal_of_nic(peer)


@dataclass(frozen=True)
class ProxyPath:
    """A thread of the host, over libfabric, which the other rank's machine may lack."""

    places: Places
    name = PROXY
    mutual = False

    def refusal(self, peer: int) -> str:
        """See `Path`."""
        del peer  # a provider is found from this machine's address alone: that it reaches a peer, sending to it tells
        return self._refusal

    @cached_property
    def _refusal(self) -> str:
        if self.places.in_process:  # a loopback takes its place
            return ""
        return C.libfabric_refusal(self.places.provider, self.places.address).removeprefix('fabric "proxy": ')


_PATHS: dict[str, tuple[type[Path], ...]] = {
    PEER: (PeerPath,),
    IBGDA: (IbgdaPath,),
    PROXY: (ProxyPath,),
    WEAK: (WeakPath,),
    MIXED: (EvenPeerPath, WeakPath),
}


def paths_of(fabrics: Sequence[str], places: Places) -> list[Path]:
    """Return the paths that fabrics stand for, those to be preferred first."""
    if places.symmetric is not None:
        return [NvshmemPath(places.symmetric) if fabric == IBGDA else PeerPath(places) for fabric in fabrics]
    return [path(places) for fabric in fabrics for path in _PATHS[fabric]]  # type: ignore[call-arg]
