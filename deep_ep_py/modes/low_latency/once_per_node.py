"""Whether rows of a low-latency dispatch go once to each node, or to each of its ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deep_ep_py.device.rates import destinations
from deep_ep_py.modes.low_latency.sizes import Sizes

if TYPE_CHECKING:
    from deep_ep_py.topology.topology import Topology

_BF16_BYTES = 2


def seconds_saved(topology: Topology, sizes: Sizes, use_fp8: bool) -> float:
    """Return how many seconds of a NIC's time a dispatch saves if rows go once to each node.

    With T tokens of a rank, K choices of each, all experts equally popular, R ranks in N nodes and rows of b bytes::

        seconds = T * (1 - 1 / N) * (destinations(K, R) - destinations(K, N)) * b / bandwidth

    Scales are not counted.

    Parameters
    ----------
    topology : Topology
        Of the Buffer; `link.bandwidth` is that of a rank's NIC.
    sizes : Sizes
        Of the call: the tokens that a rank may have.
    use_fp8 : bool
        Whether rows travel as float8, a byte for each element.
    """
    far = 1 - 1 / topology.nodes  # of all ranks, and of all nodes
    ranks, nodes = (destinations(sizes.topk, count) for count in (topology.ranks, topology.nodes))
    row_bytes = sizes.hidden * (1 if use_fp8 else _BF16_BYTES)
    return sizes.max_tokens * far * (ranks - nodes) * row_bytes / topology.link.bandwidth


def forwards(topology: Topology, sizes: Sizes, use_fp8: bool) -> bool:
    """Tell whether rows go once to each node: as the Buffer says, else where the wire saves more than the hop costs.

    All ranks decide alike: they agree on all that it depends on.
    """
    if topology.nodes == 1 or topology.ranks_per_node == 1 or topology.once_per_node is False:
        return False
    return topology.once_per_node is True or seconds_saved(topology, sizes, use_fp8) > topology.link.hop
