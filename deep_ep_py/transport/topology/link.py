"""The link between nodes: how much must be in flight to keep a NIC busy."""

from __future__ import annotations

from dataclasses import dataclass

from deep_ep_py.base import arguments
from deep_ep_py.base.native import C


@dataclass(frozen=True)
class Link:
    """The link from a rank's NIC to the other nodes, for rows that are forwarded within the node that they reach.

    Parameters
    ----------
    bandwidth : float
        Bandwidth of one rank's NIC in bytes per second; 50e9 for 400 Gbit/s.
    round_trip : float
        Seconds from the put of a chunk to the answer that its slot is free again, not counting the transfer time of the
        bytes: about 10e-6 on InfiniBand, 15e-6 to 25e-6 on AWS EFA.
    hop : float
        Seconds that forwarding within a node adds: how much later than the rank whose NIC receives rows the other ranks
        of the node learn of them. The default is an assumption, not yet measured.
    rails : bool
        Ranks of different nodes reach each other only if they have the same local index, for example because each NIC
        of a node is on a network of its own. Low-latency mode and one hop then do not work between nodes, and `recover`
        can leave out only whole nodes.

    Raises
    ------
    TypeError, ValueError
        A parameter is invalid; the message names it.
    """

    bandwidth: float = 50e9
    round_trip: float = 10e-6
    hop: float = 2e-6
    rails: bool = False

    def __post_init__(self) -> None:
        ranges = {"bandwidth": (1e6, 1e13), "round_trip": (1e-7, 1.0), "hop": (0.0, 1.0)}
        for name, (least, most) in ranges.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError(f"link.{name}={arguments.describe(value)}: expected a number")
            if not least <= value <= most:
                raise ValueError(f"link.{name}={arguments.describe(value)}: expected {least:g} to {most:g}")
        arguments.flag("link.rails", self.rails)

    @property
    def bytes_in_flight(self) -> int:
        """Bandwidth times round trip: with less than this in flight, the NIC idles while it waits for answers."""
        return max(1, round(self.bandwidth * self.round_trip))

    def staging(
        self, hidden_bytes: int, num_topk: int, num_experts: int, num_ranks: int, ranks_per_node: int
    ) -> tuple[int, int]:
        """Return the number of rows in a chunk between nodes, and the bytes of each region that a Buffer uses.

        A NIC serves the row streams to all other nodes, and each row stream has 4 slots for chunks
        (`C.two_hops.SLOTS`). All slots together hold what must be in flight::

            rows = ceil(bandwidth * round_trip / ((nodes - 1) * slots * row))

        Here `row` is the size of a row in bytes, with the ids, weights and scales that travel with x and a few more
        words. A chunk has at least 1 row, at most 128, and no more than fit into 512 KiB. Larger chunks would only take
        more memory, and make the first row of each wait longer for the last. A region holds the slots at both ends, and
        2 for each row stream inside the node::

            bytes = (2 * (nodes - 1) * slots + num_ranks * 2) * rows * row + messages of counts and offers

        So memory is linear in the number of nodes and, for outputs that the other ranks cannot see, in the number of
        ranks; it does not depend on the number of tokens.

        Parameters
        ----------
        hidden_bytes : int
            Bytes of a token's row.
        num_topk, num_experts : int
            Experts per token, and total number of experts.
        num_ranks, ranks_per_node : int
            Ranks of the Buffer and of each node: at least two nodes.

        Returns
        -------
        rows : int
            Rows in a chunk of a dispatch.
        region_bytes : int
            Bytes per region. A Buffer has 2 regions by default.

        Raises
        ------
        TypeError, ValueError
            An argument is invalid; the message names it.
        """
        arguments.integer("hidden_bytes", hidden_bytes, 1, arguments.MAX_ROW_BYTES)
        arguments.integer("num_topk", num_topk, 1, arguments.MAX_TOPK)
        arguments.integer("num_ranks", num_ranks, 2, arguments.MAX_RANKS)
        arguments.experts(num_experts, num_ranks)
        if num_ranks % arguments.integer("ranks_per_node", ranks_per_node, 1, num_ranks // 2):
            raise ValueError(f"ranks_per_node={ranks_per_node}: expected a divisor of the {num_ranks} ranks")
        sizes = C.normal.Sizes(0, hidden_bytes, num_topk, num_experts)
        return C.two_hops.staging(
            sizes, ranks=num_ranks, ranks_per_node=ranks_per_node, bytes_in_flight=self.bytes_in_flight
        )


SOFTWARE = Link(bandwidth=2**30, round_trip=2**-10, hop=2**-10)
"""The link between software NICs: a core copies the bytes, and an answer waits until the process at the other end gets
to run."""
