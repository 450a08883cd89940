"""The two greedy steps of a plan: how many replicas each expert has, and how items are packed evenly.

Both work on many independent rows at once, such as the nodes of all layers, and loop only over the items of a row.
Loads are float32, and each operation rounds once, so results are the same on every machine.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]


class Replicas(NamedTuple):
    """The replicas of each row's experts: the first replica of every expert, then the redundant ones.

    Attributes
    ----------
    experts : numpy.ndarray
        int64 [rows, replicas]: the expert that each replica holds.
    ordinals : numpy.ndarray
        int64 [rows, replicas]: the replica's index among those of its expert.
    counts : numpy.ndarray
        int64 [rows, experts]: the number of replicas of each expert.
    """

    experts: Ints
    ordinals: Ints
    counts: Ints


def replicate(loads: Floats, num_replicas: int) -> Replicas:
    """Give redundant replicas, one at a time, to the expert with the highest load per replica.

    The highest load of a replica is then as low as that many replicas allow. Of equal loads per replica, the expert
    with the lower index gets the next one.

    Parameters
    ----------
    loads
        [rows, experts], finite and not negative.
    num_replicas
        Replicas in a row; at least the number of experts.
    """
    rows, num_experts = loads.shape
    each = np.arange(rows)
    experts = np.empty((rows, num_replicas), np.int64)
    experts[:, :num_experts] = np.arange(num_experts)
    ordinals = np.zeros_like(experts)
    counts = np.ones((rows, num_experts), np.int64)
    for replica in range(num_experts, num_replicas):
        busiest = per_replica(loads, counts).argmax(axis=1)  # the first of equals
        experts[:, replica] = busiest
        ordinals[:, replica] = counts[each, busiest]
        counts[each, busiest] += 1
    return Replicas(experts, ordinals, counts)


def per_replica(loads: Floats, counts: Ints) -> Floats:
    """Return the load of each replica of an expert, [rows, experts]: they share that of the expert equally."""
    # Without the dtype, float32 by int64 would be divided in float64.
    return np.divide(loads, counts, dtype=np.float32)


def pack(loads: Floats, num_packs: int) -> Ints:
    """Distribute each row's items over packs of equally many items, with loads as even as a greedy choice makes them.

    The heaviest item comes first, and each goes to the pack with the least load among those that have room. Of items
    with equal loads, the one with the lower index comes first; of packs with equal loads, the lower index is chosen.
    If packs have one item each, no choice makes their loads more even, and item i is in pack i.

    Parameters
    ----------
    loads
        [rows, items], finite and not negative.
    num_packs
        A divisor of the number of items.

    Returns
    -------
    numpy.ndarray
        int64 [rows, packs, items / packs]: the items in each pack, in the order in which they were placed.
    """
    rows, items = loads.shape
    room = items // num_packs
    if room == 1:
        return np.broadcast_to(np.arange(items)[:, None], (rows, items, 1)).copy()
    each = np.arange(rows)
    packed = np.empty((rows, num_packs, room), np.int64)
    load = np.zeros((rows, num_packs), np.float32)
    filled = np.zeros((rows, num_packs), np.int64)
    for item in np.argsort(-loads, axis=1, kind="stable").T:
        lightest = np.where(filled < room, load, np.inf).argmin(axis=1)  # the first of equals
        packed[each, lightest, filled[each, lightest]] = item
        load[each, lightest] += loads[each, item]
        filled[each, lightest] += 1
    return packed
