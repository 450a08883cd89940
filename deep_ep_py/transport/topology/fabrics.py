"""The fabrics that a caller wants, in order, and the resulting number of ranks per node."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from deep_ep_py.base import arguments
from deep_ep_py.base.environment import FABRIC, RANKS_PER_NODE
from deep_ep_py.transport.topology.paths import IBGDA, MIXED, PEER, PROXY, WEAK

if TYPE_CHECKING:
    from deep_ep_py.device.device import Device

_SYMMETRIC = (PEER, IBGDA)
"""The fabrics that can reach NVSHMEM's symmetric heap."""


@dataclass(frozen=True)
class Choice:
    """The fabrics and the node size that were chosen.

    Attributes
    ----------
    fabrics : tuple of str
        In order of preference: each pair of ranks takes the first that connects them.
    ranks_per_node : int
        Number of consecutive ranks that share a node; all nodes have the same size.
    given : str
        What the caller has passed, for error messages.
    """

    fabrics: tuple[str, ...]
    ranks_per_node: int
    given: str

    @staticmethod
    def of(
        device: Device, machines: Sequence[int], fabric: Any, ranks_per_node: Any, symmetric: bool = False
    ) -> Choice:
        """Check the caller's arguments, and choose those that it leaves out.

        Parameters
        ----------
        device : Device
            The device of the ranks.
        machines : sequence of int
            The machine of each rank.
        fabric, ranks_per_node
            As in `Buffer`.
        symmetric
            Whether heaps are in NVSHMEM's symmetric heap.

        Raises
        ------
        TypeError, ValueError
            An argument, or the environment variable that replaces it, is invalid; the message names it.
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
                    f"{name}={per_node}: expected fabric='proxy' with it on a GPU, or 'ibgda' for software NICs; with "
                    "either, rows go through host memory, which is not fast"
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
                        f"{name}={per_node}: expected 'peer' first in {source}={[*fabrics]} with it, because "
                        "the ranks of a node share memory"
                    )
                shared = 1
        if ranks % shared:
            raise ValueError(f"{name}={shared}: expected a divisor of the {ranks} ranks: all nodes have the same size")
        return Choice(fabrics, shared, f"{source}={arguments.describe(fabric)}")


def in_words(text: str) -> str | list[str]:
    """Return the value of the environment variable: one fabric, or a list if the text has commas."""
    return [name.strip() for name in text.split(",") if name.strip()] if "," in text else text


def check_fabric(source: str, fabric: Any, offered: Sequence[str], where: str) -> None:
    """Check the name of a fabric, or a list of names.

    Parameters
    ----------
    source
        The caller's name for the value.
    fabric
        The value.
    offered
        The valid names.
    where
        Where these are valid, in words.

    Raises
    ------
    TypeError, ValueError
        The value is invalid; the message names the source.
    """
    several = not isinstance(fabric, str)
    shown = f"{source}={arguments.describe(fabric)}"
    if several and not isinstance(fabric, Sequence):
        raise TypeError(f"{shown}: expected the name of a fabric, or a list of names")
    if not fabric:
        raise ValueError(f"{shown}: expected at least one name")
    names = [*fabric] if several else [fabric]
    for name in names:
        if name not in offered:
            known = ", ".join(each for each in offered if each not in (WEAK, MIXED))  # these are for tests
            hint = "; several go in a list" if "," in str(name) else ""
            raise ValueError(f"{shown}: expected {'some' if several else 'one'} of {known} {where}{hint}")
    if MIXED in names and several:
        raise ValueError(f"{shown}: expected {MIXED!r} by itself, because it stands for two others")
    if len(set(names)) < len(names):
        raise ValueError(f"{shown}: expected each name once")
    if PEER in names[1:]:
        raise ValueError(f"{shown}: expected {PEER!r} first or not at all: ranks of a node share memory")


def _ranks_of_machine(machines: Sequence[int]) -> int:
    """Return the number of ranks on each machine; raise unless they are consecutive, with equally many on each."""
    count = [*machines].count(machines[0])
    if len(machines) % count or [*machines] != [rank // count for rank in range(len(machines))]:
        raise ValueError(
            f"group: ranks 0, 1, ... are on machines {[*machines]}; expected the ranks of a machine to be consecutive, "
            "with equally many on each"
        )
    return count


def _ranks_per_node(given: Any) -> tuple[str, int | None]:
    """Return the name and the value that were given; the value is None if none was."""
    name = "ranks_per_node"
    if given is None and (text := os.environ.get(RANKS_PER_NODE)):
        name, given = RANKS_PER_NODE, int(text) if text.isdecimal() else text
    return name, None if given is None else arguments.integer(name, given, 1, arguments.MAX_RANKS)


def _meaning(fabric: str, per_node: int | None, ranks: int, of_machine: int) -> tuple[tuple[str, ...], int]:
    """Return the fabrics that a single name stands for, and the number of ranks per node.

    A fabric that joins nodes leaves the ranks within a node to loads and stores. On a single machine, no ranks share a
    node unless `per_node` says so.
    """
    if fabric in (IBGDA, PROXY):
        alone = 1 if of_machine == ranks else of_machine
        return (PEER, fabric), min(per_node or alone, ranks)
    if fabric == WEAK and per_node is not None and per_node < ranks:
        return (PEER, WEAK), per_node
    return (fabric,), of_machine
