"""The ranks of a Buffer as one of them sees them: which share its node, and how it reaches each."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from deep_ep_py.base import arguments
from deep_ep_py.base.cpus import proxy_cpus
from deep_ep_py.base.environment import PROVIDER
from deep_ep_py.base.native import C
from deep_ep_py.transport.topology.fabrics import Choice
from deep_ep_py.transport.topology.gpus import Apart
from deep_ep_py.transport.topology.link import SOFTWARE, Link
from deep_ep_py.transport.topology.nic import NicOptions
from deep_ep_py.transport.topology.paths import PEER, PROXY, Places, paths_of
from deep_ep_py.transport.topology.routes import Reach, Routes

if TYPE_CHECKING:
    from deep_ep_py.device.device import Device
    from deep_ep_py.transport.nvshmem.memory import NvshmemMemory


@dataclass(frozen=True)
class Topology:
    """The topology of a Buffer, made once per Buffer; code that depends on nodes or on mapped heaps consults it.

    Attributes
    ----------
    rank, ranks : int
        The rank whose view this is, and the number of ranks.
    fabrics : tuple of str
        The fabrics by which ranks may reach each other, in order of preference.
    ranks_per_node : int
        Number of consecutive ranks that share a node; all nodes have the same size.
    nic : NicOptions
        Settings of software NICs.
    link : Link
        The link between nodes.
    hops : int
        How normal mode crosses nodes: 1, directly to each rank; 2, to one rank of the node, which forwards.
    low_latency : bool
        Whether the Buffer has low-latency mode, in which every rank sends to every other.
    once_per_node : bool or None
        Whether low-latency rows go once to each node; None means where that pays.
    forward_sms : int
        Blocks that forward such rows while a hook is pending; 0: with a hook, rows go to each rank.
    provider : str
        The libfabric provider of the proxy; empty for the best available.
    machines : tuple of int
        The machine of each rank; all machines have equally many ranks.
    proxy_cpus : tuple of int
        CPUs on which this rank's proxy may run; empty for any.
    routes : tuple of str
        By rank: "peer" if its heap is used by loads and stores, otherwise the fabric that reaches it. The same from
        both sides. There are no queue pairs to ranks that no operation involves.
    networks : tuple of str
        The fabrics that join the ranks of the Buffer that do not use each other's heaps; empty if all do. The same on
        all ranks.
    given : str
        What the caller has passed about fabrics.
    reach : Reach
        The ranks that this rank, on its own, has found that it reaches.
    apart : Apart
        Ranks whose GPUs do not use each other's memory.
    """

    rank: int
    ranks: int
    fabrics: tuple[str, ...]
    ranks_per_node: int
    nic: NicOptions = field(default_factory=NicOptions)
    link: Link = SOFTWARE
    hops: int = 1
    low_latency: bool = False
    once_per_node: bool | None = None
    forward_sms: int = 0
    provider: str = ""
    machines: tuple[int, ...] = ()
    proxy_cpus: tuple[int, ...] = ()
    routes: tuple[str, ...] = ()
    networks: tuple[str, ...] = ()
    given: str = ""
    reach: Reach = field(default=Reach((), (), ()), repr=False)
    apart: Apart = field(default_factory=Apart, repr=False)

    @property
    def nodes(self) -> int:
        """The number of nodes."""
        return self.ranks // self.ranks_per_node

    @property
    def node(self) -> int:
        """The index of the node of `rank`."""
        return self.rank // self.ranks_per_node

    @property
    def local_rank(self) -> int:
        """The index of `rank` in its node."""
        return self.rank % self.ranks_per_node

    @property
    def mapped(self) -> tuple[bool, ...]:
        """Whether each rank's heap is used by loads and stores, by rank. The same from both sides."""
        return tuple(route == PEER for route in self.routes)

    @property
    def near_only(self) -> bool:
        """Whether operations involve only ranks of this rank's node and their forwarding partners on other nodes.

        These are the ranks on other nodes that forward this rank's rows, or whose rows it forwards.
        """
        return self.hops == 2 and not self.low_latency

    def is_rail_peer(self, peer: int) -> bool:
        """Whether `peer` is on another node and has the same local index."""
        return peer // self.ranks_per_node != self.node and peer % self.ranks_per_node == self.local_rank

    def check_mask(self, mask: int) -> None:
        """Check that operations can continue without the ranks whose bits are set.

        Raises
        ------
        ValueError
            With two hops, if a node does not have enough ranks left to take over the forwarding, or if `Link.rails`
            separates them from the ranks on other nodes for which they would forward.
        """
        for node in range(self.nodes if self.hops == 2 else 0):
            ranks = range(node * self.ranks_per_node, (node + 1) * self.ranks_per_node)
            left_out = [rank for rank in ranks if mask >> rank & 1]
            if self.link.rails and 0 < len(left_out) < len(ranks):
                raise ValueError(
                    f"mask={left_out}: expected all ranks of node {node} or none: the link to other nodes has rails, "
                    "so no other rank of that node reaches those that these forward for; leave out the whole node"
                )
            if len(ranks) > len(left_out) > len(ranks) // C.two_hops.ROLES:
                raise ValueError(
                    f"mask={left_out}: expected at most {len(ranks) // C.two_hops.ROLES} ranks of node {node}, or all: "
                    "another rank of the node must forward for each that is left out (hops=2); make a new Buffer of "
                    "the remaining ranks"
                )

    def must_agree(self) -> dict[str, Any]:
        """Return the values that must be the same on all ranks, by the names that callers know."""
        nic = {f"nic.{name}": value for name, value in asdict(self.nic).items()}
        between_nodes: dict[str, Any] = {}
        if self.nodes > 1:
            between_nodes = {"once_per_node": self.once_per_node, "forward_sms": self.forward_sms}
            between_nodes |= {f"link.{name}": value for name, value in asdict(self.link).items()}
        return {
            "fabric": [*self.fabrics],
            "ranks_per_node": self.ranks_per_node,
            "hops": self.hops,
            "low_latency_mode": self.low_latency,
            PROVIDER: self.provider,
            **between_nodes,
            **nic,
        }

    @staticmethod
    def of(
        rank: int,
        ranks: int,
        device: Device,
        fabric: Any,
        ranks_per_node: Any,
        nic: Any,
        link: Any = None,
        hops: Any = None,
        low_latency: bool = False,
        once_per_node: Any = None,
        forward_sms: Any = 0,
        machines: Sequence[int] | None = None,
        in_process: bool = True,
        address: str = "",
        symmetric: NvshmemMemory | None = None,
        apart: Apart | None = None,
    ) -> Topology:
        """Check the caller's arguments, and choose those that it leaves out.

        Paths are those found by this rank alone; `agree` settles them with the others.

        Parameters
        ----------
        rank, ranks : int
            The caller, and the number of ranks.
        device : Device
            The device of the ranks.
        fabric, ranks_per_node, nic, link, hops, once_per_node, forward_sms
            As in `Buffer`.
        low_latency
            Whether the Buffer has low-latency mode.
        machines : list of int, optional
            The machine of each rank. None means that all are on one.
        in_process
            Whether all ranks are threads of this process.
        address
            The address at which ranks on other machines reach this one; empty if there are none.
        symmetric
            The memory that heaps are in; None means memory of their own.
        apart : Apart, optional
            Ranks that must not use each other's memory by loads and stores. None means that there are none.

        Raises
        ------
        TypeError, ValueError
            An argument is invalid; the message names it.
        """
        machines = tuple(machines or [0] * ranks)
        choice = Choice.of(device, machines, fabric, ranks_per_node, symmetric is not None)
        per_node = choice.ranks_per_node
        if nic is not None and not isinstance(nic, NicOptions):
            raise TypeError(f"nic={arguments.describe(nic)}: expected a NicOptions")
        if link is not None and not isinstance(link, Link):
            raise TypeError(f"link={arguments.describe(link)}: expected a Link")
        several = per_node < ranks
        apart = apart or Apart()
        split = apart.inside_a_node(per_node) if several else None
        if hops is None:
            hops = 2 if several and per_node > 1 and split is None else 1
        if arguments.integer("hops", hops, 1, 2) == 2 and not several:
            raise ValueError("hops=2: expected several nodes, but these ranks are on one")
        if once_per_node is not None and arguments.flag("once_per_node", once_per_node):
            if not low_latency:
                raise ValueError("once_per_node=True: expected low_latency_mode=True with it; normal mode has hops=2")
            if not several or per_node == 1:
                raise ValueError(
                    f"once_per_node=True: expected several nodes of several ranks, but each node has {per_node} of "
                    f"{ranks}"
                )
        if split is not None:
            # A rank that forwards rows stores them into the heaps of its node.
            if hops == 2 or once_per_node:
                raise ValueError(
                    f"{'hops=2' if hops == 2 else 'once_per_node=True'}: expected ranks of a node to use each other's "
                    f"memory; ranks {split[0]} and {split[1]}: {apart.reason(*split)}"
                )
            once_per_node = False
        arguments.integer("forward_sms", forward_sms, 0, arguments.MAX_BLOCKS)
        if link is not None and link.rails and several and per_node > 1 and (hops == 1 or low_latency):
            raise ValueError(
                f"link.rails=True: expected {'low_latency_mode=False' if low_latency else 'hops=2'} with it: otherwise "
                "each rank sends to all ranks of other nodes"
            )
        places = Places(rank, machines, per_node, in_process, os.environ.get(PROVIDER, ""), address, symmetric, apart)
        reach = Reach.of(paths_of(choice.fabrics, places), rank, ranks)
        routes = Routes.alone(reach, rank)
        return Topology(
            rank,
            ranks,
            choice.fabrics,
            per_node,
            nic or NicOptions(),
            link or SOFTWARE,
            hops,
            low_latency,
            once_per_node,
            forward_sms,
            places.provider if PROXY in reach.asked else "",  # even if it refused: ranks then report the refusal
            machines,
            proxy_cpus() if PROXY in reach.in_use else (),
            routes.own,
            routes.networks,
            choice.given,
            reach,
            apart,
        )
