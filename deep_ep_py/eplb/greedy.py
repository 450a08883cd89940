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


def replicate(loads: Floats, num_replicas: int, num_packs: int) -> Replicas:
    """Give redundant replicas, one at a time, to the expert with the highest load per replica.

    Experts that have a replica for each pack get no more while another has fewer: two replicas in one pack share what
    one would have got. The highest load of a replica is then as low as that many replicas, with at most one for each
    pack, allow. Of equal loads per replica, the expert with the lower index gets the next one. Once all experts have a
    replica for each pack, the first gets the rest.

    Parameters
    ----------
    loads
        [rows, experts], finite and not negative.
    num_replicas
        Replicas in a row; at least the number of experts.
    num_packs
        Packs that the replicas of a row will be distributed over.
    """
    rows, num_experts = loads.shape
    each = np.arange(rows)
    experts = np.empty((rows, num_replicas), np.int64)
    experts[:, :num_experts] = np.arange(num_experts)
    ordinals = np.zeros_like(experts)
    counts = np.ones((rows, num_experts), np.int64)
    for replica in range(num_experts, num_replicas):
        busiest = np.where(counts < num_packs, per_replica(loads, counts), -1).argmax(axis=1)  # the first of equals
        experts[:, replica] = busiest
        ordinals[:, replica] = counts[each, busiest]
        counts[each, busiest] += 1
    return Replicas(experts, ordinals, counts)


def per_replica(loads: Floats, counts: Ints) -> Floats:
    """Return the load of each replica of an expert, [rows, experts]: they share that of the expert equally."""
    # Without the dtype, float32 by int64 would be divided in float64.
    return np.divide(loads, counts, dtype=np.float32)


def pack(loads: Floats, experts: Ints, num_packs: int) -> Ints:
    """Distribute each row's items over packs of equally many items, with loads as even as a greedy choice makes them.

    No pack gets two items of an expert. Of an expert with more items than there are packs, none gets more than an equal
    share, rounded up.

    The heaviest item comes first, and each goes to the pack with the least load among those that have room and may take
    it. Of items with equal loads, the one with the lower index comes first; of packs with equal loads, the lower index
    is chosen. If packs have one item each, no choice makes their loads more even, and item i is in pack i.

    Parameters
    ----------
    loads
        [rows, items], finite and not negative.
    experts
        [rows, items]: the expert of each item.
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
    packed = np.zeros((rows, num_packs, room), np.int64)
    held = np.full_like(packed, -1)
    load = np.zeros((rows, num_packs), np.float32)
    filled = np.zeros((rows, num_packs), np.int64)
    shares = np.stack([-(-np.bincount(row) // num_packs)[row] for row in experts])
    diverted = np.zeros(rows, bool)
    for item in np.argsort(-loads, axis=1, kind="stable").T:
        has_room = filled < room
        of_expert = (held == experts[each, item, None, None]).sum(axis=2)
        takes_it = has_room & (of_expert < shares[each, item, None])
        lightest = _lightest(load, has_room)
        chosen = np.where(takes_it.any(axis=1), _lightest(load, takes_it), lightest)
        diverted |= ~takes_it[each, lightest]
        for row in np.flatnonzero(~takes_it[each, chosen]):
            packs = _Packs(loads[row], experts[row], shares[row], packed[row], held[row], load[row])
            item[row] = _replace(packs, item[row], chosen[row])
        packed[each, chosen, filled[each, chosen]] = item
        held[each, chosen, filled[each, chosen]] = experts[each, item]
        load[each, chosen] += loads[each, item]
        filled[each, chosen] += 1
    for row in np.flatnonzero(diverted):
        _even_out(_Packs(loads[row], experts[row], shares[row], packed[row], held[row], load[row]))
    return packed


def _lightest(load: Floats, among: NDArray[np.bool_]) -> Ints:
    """Return the pack with the least load in each row, the first of equals."""
    return np.where(among, load, np.inf).argmin(axis=1)


class _Packs(NamedTuple):
    """The packs of one row; views of what `pack` has.

    Attributes
    ----------
    loads, experts, shares : numpy.ndarray
        [items]: the load of each item, its expert, and how many items of that expert a pack may have.
    packed, held : numpy.ndarray
        [packs, items of a pack]: the items, and their experts; -1: none yet.
    load : numpy.ndarray
        [packs]: the sum of the loads.
    """

    loads: Floats
    experts: Ints
    shares: Ints
    packed: Ints
    held: Ints
    load: Floats


def _replace(packs: _Packs, item: int, pack: int) -> int:
    """Put an item into a full pack, and return the one that was in its place, for a pack that has room.

    To be called if no pack that has room may take the new item. A full one may then, and if the other pack had its
    share of the new item's expert and of all experts in there, it would be full too: so there is an item to return.
    Of several, the heavier of the two packs decides, then the order.
    """
    loads, experts, shares, packed, held, load = packs
    takes_it = (held >= 0).all(axis=1) & ((held == experts[item]).sum(axis=1) < shares[item])
    may_leave = (held[:, :, None] == held[pack]).sum(axis=2) < shares[packed]
    here, there = load[:, None] - loads[packed] + loads[item], load[pack] + loads[packed]
    heavier = np.where(takes_it[:, None] & may_leave, np.maximum(here, there), np.inf)
    place = np.unravel_index(heavier.argmin(), heavier.shape)
    replaced = int(packed[place])
    packed[place], held[place], load[place[0]] = item, experts[item], here[place]
    return replaced


def _even_out(packs: _Packs) -> None:
    """Swap items of the heaviest pack for others, as long as that makes both packs lighter than it was.

    For a row in which an item could not go to the lightest pack; all others are as EPLB packs them. There are no more
    swaps than packs.
    """
    loads, _, shares, packed, held, load = packs
    for _ in range(len(load)):
        heaviest = load.argmax()
        own = packed[heaviest]
        may_go = (held[:, :, None] == held[heaviest]).sum(axis=1) < shares[own]
        may_come = (held[:, :, None] == held[heaviest]).sum(axis=2) < shares[packed]
        more = loads[packed][:, :, None] - loads[own]
        heavier = np.maximum(load[heaviest] + more, load[:, None, None] - more)
        heavier[~(may_go[:, None, :] & may_come[:, :, None])] = np.inf
        pack, slot, own_slot = np.unravel_index(heavier.argmin(), heavier.shape)
        if heavier[pack, slot, own_slot] >= load[heaviest]:
            return
        load[heaviest] += more[pack, slot, own_slot]
        load[pack] -= more[pack, slot, own_slot]
        for of in (packed, held):
            of[heaviest, own_slot], of[pack, slot] = of[pack, slot], of[heaviest, own_slot]
