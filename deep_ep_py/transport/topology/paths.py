"""The paths to other ranks; each path decides which ranks it reaches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

from deep_ep_py.base.native import C
from deep_ep_py.transport.topology.gpus import Apart

if TYPE_CHECKING:
    from deep_ep_py.transport.nvshmem.memory import NvshmemMemory

PEER, IBGDA, PROXY, WEAK, MIXED = "peer", "ibgda", "proxy", "weak", "mixed"


@dataclass(frozen=True)
class Places:
    """Where the ranks of a Buffer are, as one of them sees it.

    Attributes
    ----------
    rank : int
        This rank.
    machines : tuple of int
        The machine of each rank.
    ranks_per_node : int
        Number of consecutive ranks that share a node.
    in_process : bool
        Whether all ranks are threads of this process.
    provider : str
        The libfabric provider that the proxy must use; empty for the best available.
    address : str
        The address at which other machines reach this one; empty if all ranks are on one machine.
    symmetric : NvshmemMemory, optional
        The memory that heaps are in. None means memory of their own.
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
        """Return whether a rank is on this machine."""
        return self.machines[peer] == self.machines[self.rank]

    def shares_node(self, peer: int) -> bool:
        """Return whether a rank is on this node, which is a part of a machine."""
        return self.is_near(peer) and peer // self.ranks_per_node == self.rank // self.ranks_per_node


class Path(Protocol):
    """A path to other ranks.

    Attributes
    ----------
    name : str
        Name of the route: "peer", or a fabric of csrc/fabric/registry.h.
    mutual : bool
        Whether all ranks that it reaches also reach this one by it, so that they need not be asked.
    """

    name: str
    mutual: bool

    def refusal(self, peer: int) -> str:
        """Return why the path does not reach a rank, worded to follow the path's name; empty if it does."""


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
    """`PeerPath` for every other pair of ranks: for tests, where the fabric "mixed" leaves the rest to "weak"."""

    places: Places
    name = PEER
    mutual = True

    def refusal(self, peer: int) -> str:
        """See `Path`."""
        if (self.places.rank + peer) % 2:
            return "the sum of their numbers is odd"
        return PeerPath(self.places).refusal(peer)


@dataclass(frozen=True)
class _PathOfMachine:
    """A path through memory that all ranks of a machine share, including those of different nodes."""

    places: Places
    name = ""
    mutual = True
    _elsewhere = "it reaches only its own machine"

    def refusal(self, peer: int) -> str:
        """See `Path`."""
        return "" if self.places.is_near(peer) else self._elsewhere


class IbgdaPath(_PathOfMachine):
    """Work requests that kernels write for software NICs."""

    name = IBGDA
    _elsewhere = "software NICs reach only their own machine"


class WeakPath(_PathOfMachine):
    """A memory-to-memory copy agent that delays, cuts and reorders, for tests."""

    name = WEAK


@dataclass(frozen=True)
class NvshmemPath:
    """Work requests that kernels write for real NICs, on NVSHMEM's queue pairs, which the other PE may lack."""

    symmetric: NvshmemMemory
    name = IBGDA
    mutual = False

    def refusal(self, peer: int) -> str:
        """See `Path`."""
        return self.symmetric.refusal_of_nic(peer)


@dataclass(frozen=True)
class ProxyPath:
    """A host thread that sends over libfabric, which the other rank's machine may lack."""

    places: Places
    name = PROXY
    mutual = False

    def refusal(self, peer: int) -> str:
        """See `Path`."""
        del peer  # a provider is found from this machine's address alone; whether it reaches a peer, only sending shows
        return self._refusal

    @cached_property
    def _refusal(self) -> str:
        if self.places.in_process:  # a loopback replaces it
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
    """Return the paths that fabrics stand for, in order of preference."""
    if places.symmetric is not None:
        return [NvshmemPath(places.symmetric) if fabric == IBGDA else PeerPath(places) for fabric in fabrics]
    return [path(places) for fabric in fabrics for path in _PATHS[fabric]]  # type: ignore[call-arg]
