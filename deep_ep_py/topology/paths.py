"""How the ranks of a Buffer reach each other."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from deep_ep_py.core import arguments
from deep_ep_py.topology.nic import NicOptions

if TYPE_CHECKING:
    from deep_ep_py.device.device import Device

RANKS_PER_NODE = "DEEP_EP_RANKS_PER_NODE"
"""Environment variable in the place of an argument."""


@dataclass(frozen=True)
class Paths:
    """How ranks reach each other.

    Attributes
    ----------
    fabric : str
        As `Buffer` takes it.
    ranks_per_node : int
        Neighbours in number that share a node.
    nic : NicOptions
        What software NICs are like.
    """

    fabric: str = "peer"
    ranks_per_node: int = 1
    nic: NicOptions = field(default_factory=NicOptions)

    def mapped(self, rank: int, peer: int) -> bool:
        """Tell whether `peer`'s heap is used by loads and stores. The same from both sides."""
        if rank == peer or self.fabric == "peer":
            return True
        if self.fabric == "ibgda":
            return rank // self.ranks_per_node == peer // self.ranks_per_node
        return self.fabric == "mixed" and (rank + peer) % 2 == 0

    def has_remote(self, ranks: int) -> bool:
        """Tell whether some pair of them is not."""
        return any(not self.mapped(i, j) for i in range(ranks) for j in range(ranks))

    @staticmethod
    def of(ranks: int, device: Device, fabric: Any, ranks_per_node: Any, nic: Any) -> Paths:
        """Check what a caller passes, and find what it leaves out.

        Parameters
        ----------
        ranks : int
            How many there are.
        device : Device
            Where they compute.
        fabric, ranks_per_node, nic
            As `Buffer` takes them.

        Raises
        ------
        TypeError, ValueError
            Naming the argument.
        """
        name, given = "ranks_per_node", ranks_per_node
        if given is None and (text := os.environ.get(RANKS_PER_NODE)):
            name, given = RANKS_PER_NODE, int(text) if text.isdecimal() else text
        if given is not None:
            given = arguments.integer(name, given, 1, arguments.MAX_RANKS)
        if fabric is None:
            fabric = "peer" if given is None or given >= ranks else "ibgda"
            if fabric == "ibgda" and device.asynchronous:
                raise ValueError(
                    f"{name}={given}: expected fabric='ibgda' with it on a GPU, where software NICs join nodes, over "
                    "host memory: for tests, not fast"
                )
        if not isinstance(fabric, str) or fabric not in device.fabrics:
            raise ValueError(f"fabric={fabric!r}: expected one of {', '.join(device.fabrics)} on {device.torch_device}")
        if nic is not None and not isinstance(nic, NicOptions):
            raise TypeError(f"nic={nic!r}: expected a NicOptions")
        per_node = given or 1
        if fabric == "ibgda" and ranks % per_node:
            raise ValueError(f"{name}={per_node}: expected a divisor of the {ranks} ranks, nodes have the same size")
        return Paths(fabric, min(per_node, ranks), nic or NicOptions())
