"""V2's estimate of the SMs that dispatch and combine need, from the traffic of each and the bandwidths of links."""

from __future__ import annotations

import math
from dataclasses import dataclass

SLACK = 1.25
"""SMs beyond those that the model finds."""
MIN_SMS = 4
MIN_SMS_WITHOUT_OVERLAP = 64


@dataclass(frozen=True)
class Domains:
    """How many ranks there are, and how they reach each other.

    Parameters
    ----------
    scaleout, scaleup
        Logical domains: nodes that rows are forwarded in, and ranks per node; (1, ranks) where rows go straight to each
        rank.
    nvlink
        Ranks that are reached by loads and stores, including this one.
    """

    scaleout: int
    scaleup: int
    nvlink: int

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.scaleout * self.scaleup


@dataclass(frozen=True)
class Bandwidths:
    """In GB/s: of the NIC and of NVLink, per rank; what one SM reads and writes."""

    rdma: float
    nvlink: float
    sm_read: float
    sm_write: float


def expected_destinations(groups: int, experts: int, topk: int) -> float:
    """Return the mean number of groups that a token goes to, if its experts are a random set without repetition.

    With experts divided equally among groups, a group has none of a token's `topk` experts with probability
    C(E - E/G, k) / C(E, k).
    """
    return groups * (1 - math.comb(experts - experts // groups, topk) / math.comb(experts, topk))


def num_sms(domains: Domains, experts: int, topk: int, bandwidths: Bandwidths, device_sms: int, overlap: bool) -> int:
    """Return the number of SMs with which reading and writing rows is as fast as the link that limits the call.

    All amounts are relative to the rows that a rank receives; the model is the one DeepEP V2 publishes in its
    `get_theoretical_num_sms`. A token is read once and, if it leaves by a NIC, written once more to be sent. With
    forwarding, a token crosses the wire once for each other node and is then read, and its row written, there. Without,
    rows go straight to NVLink and NICs in proportion to the ranks behind them.

    Parameters
    ----------
    domains, experts, topk
        Of the call.
    bandwidths
        Bandwidths; a link with 0 limits nothing.
    device_sms
        SMs of the GPU, which are the most.
    overlap
        Whether computation should run beside; otherwise at least 64 SMs are used.

    Returns
    -------
    int
        An even number, at least 4, unless the GPU has fewer.
    """
    to_ranks = expected_destinations(domains.ranks, experts, topk)
    token = 1 / to_ranks
    read = token
    if domains.scaleout > 1:
        to_nodes = expected_destinations(domains.scaleout, experts, topk)
        here = 1 / domains.scaleout
        rdma = token * to_nodes * (1 - here)
        nvlink = 1 - 1 / domains.scaleup
        read += token * to_nodes
        write = token + token * to_nodes * here + 1
    else:
        near = domains.nvlink / domains.ranks
        rdma, nvlink = 1 - near, near * (1 - 1 / domains.nvlink)
        write = near + (token if domains.nvlink < domains.ranks else 0)
    seconds = [traffic / rate for traffic, rate in ((rdma, bandwidths.rdma), (nvlink, bandwidths.nvlink)) if rate > 0]
    limit = max(seconds, default=0.0)
    sms = float(device_sms)
    if limit > 0:
        sms = max(read / bandwidths.sm_read, write / bandwidths.sm_write) / limit
    chosen = max(MIN_SMS, math.ceil(sms * SLACK))
    chosen += chosen % 2
    return min(chosen if overlap else max(chosen, MIN_SMS_WITHOUT_OVERLAP), device_sms)
