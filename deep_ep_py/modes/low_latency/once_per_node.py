"""The choice whether rows of a low-latency dispatch go once to each node, or to each of its ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deep_ep_py.device.rates import destinations
from deep_ep_py.modes.low_latency.sizes import Sizes

if TYPE_CHECKING:
    from deep_ep_py.transport.topology.topology import Topology

_BF16_BYTES = 2


def seconds_saved(topology: Topology, sizes: Sizes, use_fp8: bool) -> float:
    """Return how many seconds of NIC time a dispatch saves if rows go once to each node.

    With T tokens per rank, K choices per token, all experts equally likely, R ranks in N nodes and rows of b bytes::

        seconds = T * (1 - 1 / N) * (destinations(K, R) - destinations(K, N)) * b / bandwidth

    Scales are not counted.

    Parameters
    ----------
    topology : Topology
        The topology of the Buffer; `link.bandwidth` is the bandwidth of a rank's NIC.
    sizes : Sizes
        The sizes of the call; the number of tokens is the maximum.
    use_fp8 : bool
        Whether rows travel as float8, with one byte per element.
    """
    far = 1 - 1 / topology.nodes  # share of all ranks, and of all nodes
    ranks, nodes = (destinations(sizes.topk, count) for count in (topology.ranks, topology.nodes))
    row_bytes = sizes.hidden * (1 if use_fp8 else _BF16_BYTES)
    return sizes.max_tokens * far * (ranks - nodes) * row_bytes / topology.link.bandwidth


def forwards(topology: Topology, sizes: Sizes, use_fp8: bool) -> bool:
    """Return whether rows go once to each node: as the Buffer says, else if this saves more time than the hop costs.

    All ranks reach the same decision, since they agree on everything that it depends on.
    """
    if topology.nodes == 1 or topology.ranks_per_node == 1 or topology.once_per_node is False:
        return False
    return topology.once_per_node is True or seconds_saved(topology, sizes, use_fp8) > topology.link.hop
