"""Which fabrics a caller wants, in which order, and how many ranks share a node then."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from deep_ep_py.core import arguments
from deep_ep_py.core.environment import FABRIC, RANKS_PER_NODE
from deep_ep_py.topology.paths import IBGDA, MIXED, PEER, PROXY, WEAK

if TYPE_CHECKING:
    from deep_ep_py.device.device import Device

_SYMMETRIC = (PEER, IBGDA)
"""What can reach memory in NVSHMEM's symmetric heap."""


@dataclass(frozen=True)
class Choice:
    """What was chosen.

    Attributes
    ----------
    fabrics : tuple of str
        Each pair of ranks takes the first that reaches from one to the other.
    ranks_per_node : int
        Neighbours in number share a node; all nodes have the same size.
    given : str
        What the caller has said, for errors.
    """

    fabrics: tuple[str, ...]
    ranks_per_node: int
    given: str

    @staticmethod
    def of(
        device: Device, machines: Sequence[int], fabric: Any, ranks_per_node: Any, symmetric: bool = False
    ) -> Choice:
        """Check what a caller passes, and choose what it leaves out.

        Parameters
        ----------
        device : Device
            Where ranks compute.
        machines : sequence of int
            By rank: which machine it is on.
        fabric, ranks_per_node
            As `Buffer` takes them.
        symmetric
            Whether heaps lie in NVSHMEM's symmetric heap.

        Raises
        ------
        TypeError, ValueError
            Naming the argument, or the environment variable that stands in its place.
        """
        ranks, of_machine = len(machines), _ranks_of_machine(machines)
        name, per_node = _ranks_per_node(ranks_per_node)
        if of_machine < ranks and per_node is not None and of_machine % per_node:
            raise ValueError(
                f"{name}={per_node}: expected a divisor of {of_machine}, the ranks of each machine; a node is on one"
            )
        source = "fabric"
        if fabric is None and (text := os.environ.get(FABRIC)):
            source, fabric = FABRIC, in_words(text)
        if fabric is not None:
            offered = _SYMMETRIC if symmetric else device.fabrics
            where = "with heap='nvshmem'" if symmetric else f"on {device.torch_device}"
            check_fabric(source, fabric, offered, where)
        if fabric is None:
            shared = min(per_node or of_machine, ranks)
            if shared < of_machine == ranks and device.asynchronous and not symmetric:
                raise ValueError(
                    f"{name}={per_node}: expected fabric='proxy' with it on a GPU, or 'ibgda' for software NICs: with "
                    "both rows go through host memory, which is not fast"
                )
            fabrics = _SYMMETRIC if symmetric else device.default_fabrics
        elif isinstance(fabric, str):
            fabrics, shared = _meaning(fabric, per_node, ranks, of_machine)
        else:
            fabrics = tuple(fabric)
            shared = min(per_node or of_machine, ranks)
            if PEER not in fabrics:
                if per_node not in (None, 1):
                    raise ValueError(
                        f"{name}={per_node}: expected 'peer' first in {source}={[*fabrics]} with it: the "
                        "ranks of a node share memory"
                    )
                shared = 1
        if ranks % shared:
            raise ValueError(f"{name}={shared}: expected a divisor of the {ranks} ranks, nodes have the same size")
        return Choice(fabrics, shared, f"{source}={fabric!r}")


def in_words(text: str) -> str | list[str]:
    """Return what the environment variable says: a fabric, or several with commas between them."""
    return [name.strip() for name in text.split(",") if name.strip()] if "," in text else text


def check_fabric(source: str, fabric: Any, offered: Sequence[str], where: str) -> None:
    """Check the name of a fabric, or a list of names.

    Parameters
    ----------
    source
        What the caller calls it.
    fabric
        The value.
    offered
        The names that there are.
    where
        Where these are offered, in words.

    Raises
    ------
    TypeError, ValueError
        Naming the source.
    """
    several = not isinstance(fabric, str)
    if several and not isinstance(fabric, Sequence):
        raise TypeError(f"{source}={fabric!r}: expected the name of a fabric, or a list of names")
    if not fabric:
        raise ValueError(f"{source}={fabric!r}: expected at least one name")
    names = [*fabric] if several else [fabric]
    for name in names:
        if name not in offered:
            known = ", ".join(each for each in offered if each not in (WEAK, MIXED))  # these are for tests
            hint = "; several go in a list" if "," in name else ""
            raise ValueError(f"{source}={fabric!r}: expected {'some' if several else 'one'} of {known} {where}{hint}")
    if MIXED in names and several:
        raise ValueError(f"{source}={fabric!r}: expected {MIXED!r} by itself, it stands for two others")
    if len(set(names)) < len(names):
        raise ValueError(f"{source}={fabric!r}: expected each once")
    if PEER in names[1:]:
        raise ValueError(f"{source}={fabric!r}: expected {PEER!r} first or not at all, ranks of a node share memory")


def _ranks_of_machine(machines: Sequence[int]) -> int:
    """Return how many ranks each machine has; raise unless they are neighbours in number, as many on each."""
    count = [*machines].count(machines[0])
    if len(machines) % count or [*machines] != [rank // count for rank in range(len(machines))]:
        raise ValueError(
            f"group: ranks 0, 1, ... are on machines {[*machines]}; expected the ranks of a machine to be neighbours "
            "in number, as many on each"
        )
    return count


def _ranks_per_node(given: Any) -> tuple[str, int | None]:
    """Return what is given, by which name; None where nothing is."""
    name = "ranks_per_node"
    if given is None and (text := os.environ.get(RANKS_PER_NODE)):
        name, given = RANKS_PER_NODE, int(text) if text.isdecimal() else text
    return name, None if given is None else arguments.integer(name, given, 1, arguments.MAX_RANKS)


def _meaning(fabric: str, per_node: int | None, ranks: int, of_machine: int) -> tuple[tuple[str, ...], int]:
    """Return the fabrics that one by itself stands for, and how many ranks share a node.

    What joins nodes leaves the ranks of a node to loads and stores; where nothing says which ranks share a node of the
    only machine, none do.
    """
    if fabric in (IBGDA, PROXY):
        alone = 1 if of_machine == ranks else of_machine
        return (PEER, fabric), min(per_node or alone, ranks)
    if fabric == WEAK and per_node is not None and per_node < ranks:
        return (PEER, WEAK), per_node
    return (fabric,), of_machine
