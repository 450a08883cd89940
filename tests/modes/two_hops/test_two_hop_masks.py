"""Two-hop mode without some ranks (P17): another rank of the node forwards for a rank that is left out."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest

from builds import PROTOCOL_SCHEDULES, SANITIZED, SCHEDULES, schedules
from cases import BY_NAME, Case
from deep_ep_py import Link
from deep_ep_py.testing import run_ranks
from harness import Trial, barrier, cramped, dispatch_arguments, left_out, make_buffer, round_trip_without

FABRICS = ("ibgda", "proxy")
BASE = {"hidden": 24, "routing": "holes"}
LOST = [
    (Case("2x2", 4, (13, 0, 9, 21), topk=3, experts=8, ranks_per_node=2, **BASE), [1]),
    (Case("2x2", 4, (13, 0, 9, 21), topk=3, experts=8, ranks_per_node=2, **BASE), [0, 3]),
    (Case("2x2", 4, (13, 5, 9, 21), topk=3, experts=8, ranks_per_node=2, **BASE), [2, 3]),
    (Case("3x2", 6, (7, 12, 0, 5, 9, 14), topk=4, experts=12, ranks_per_node=2, **BASE), [1, 2]),
    (Case("2x3", 6, (7, 12, 0, 5, 9, 14), topk=4, experts=12, ranks_per_node=3, **BASE), [4]),
    (Case("2x4", 8, (3, 11, 7, 0, 9, 1, 12, 6), topk=4, experts=16, ranks_per_node=4, **BASE), [1, 2]),
    (Case("2x4", 8, (3, 11, 7, 0, 9, 1, 12, 6), topk=4, experts=16, ranks_per_node=4, **BASE), [0, 3, 5, 6]),
    (Case("4x2", 8, (3, 11, 7, 0, 9, 1, 12, 6), topk=4, experts=16, ranks_per_node=2, **BASE), [0, 2, 3, 5]),
]


def named(cases: list[tuple[Case, list[int]]]) -> Any:
    """Parametrize by the cases; sanitizer builds, which take ten times as long, get one of three."""
    cases = cases[::-3] if SANITIZED else cases
    names = [f"{case.name}_without_{'_'.join(map(str, lost))}" for case, lost in cases]
    return pytest.mark.parametrize(("case", "lost"), cases, ids=names)


def go_on_without(group: Any, case: Case, fabric: str, trial: Trial, rest: Trial, lost: list[int]) -> None:
    """Make one round trip with all ranks, and two without some; called on every rank."""
    buffer = make_buffer(group, case, fabric)
    round_trip_without(buffer, buffer.rank, trial, trial)
    barrier(group)
    if buffer.rank in lost:
        buffer.destroy()
        return
    buffer.recover(lost)
    assert buffer.masked_ranks == lost
    for _ in range(2):
        round_trip_without(buffer, buffer.rank, trial, rest)
    buffer.destroy()


def try_without(case: Case, lost: list[int], fabric: str, count: int) -> None:
    trial = Trial.of(case)
    for seed in schedules(count):
        run_ranks(case.ranks, go_on_without, case, fabric, trial, left_out(trial, lost), lost, seed=seed)


@pytest.mark.parametrize("arena_bytes", [None, 0], ids=["arena", "local_chunks"])
@pytest.mark.parametrize("fabric", FABRICS)
@named(LOST)
def test_ranks_are_left_out(case: Case, lost: list[int], fabric: str, arena_bytes: int | None) -> None:
    try_without(replace(case, arena_bytes=arena_bytes), lost, fabric, max(1, SCHEDULES // 4))


# In the last cases, a rank whose place another rank takes in some node takes the place of a third rank in its own node.
IN_CHUNKS = [
    (Case("4x2", 8, (13, 31, 17, 0, 29, 8, 32, 16), topk=4, experts=16, ranks_per_node=2, **BASE), [0, 2, 3, 5]),
    (Case("2x3", 6, (38, 29, 33, 31, 27, 41), topk=4, experts=12, ranks_per_node=3, **BASE), [2, 3]),
    (Case("2x4", 8, (38, 29, 33, 31, 27, 41, 25, 35), topk=4, experts=16, ranks_per_node=4, **BASE), [3, 4]),
]


@pytest.mark.parametrize("arena_bytes", [None, 0], ids=["arena", "local_chunks"])
@pytest.mark.parametrize("fabric", FABRICS)
@named(IN_CHUNKS)
def test_in_many_chunks(case: Case, lost: list[int], fabric: str, arena_bytes: int | None) -> None:
    """Chunks of as few rows as possible, so that slots of both roles are returned many times."""
    try_without(cramped(replace(case, arena_bytes=arena_bytes), fabric, 2.0), lost, fabric, PROTOCOL_SCHEDULES)


@pytest.mark.once
def test_whatever_ranks_are_left_out() -> None:
    """Twenty random draws that leave out at most half of each node, or all of it."""
    draw = random.Random(0)
    for _ in range(20):
        nodes, per_node = draw.choice([(2, 2), (2, 3), (3, 2), (2, 4), (4, 2), (3, 3)])
        ranks = nodes * per_node
        case = Case("any", ranks, tuple(draw.choices((0, 1, 6, 17), k=ranks)), ranks_per_node=per_node, hidden=16)
        case = replace(case, topk=3, experts=2 * ranks, routing=draw.choice(["holes", "uniform", "skewed"]))
        lost = []
        for node in range(nodes):
            several = draw.choice([*range(per_node // 2 + 1), per_node])
            lost += sorted(draw.sample(range(node * per_node, (node + 1) * per_node), several))
        if len(lost) == ranks:
            lost = lost[:-per_node]
        try_without(replace(case, arena_bytes=draw.choice([None, 0])), lost, draw.choice(FABRICS), 1)


def test_several_recoveries() -> None:
    """One rank after another: the assignment of forwarders changes each time."""
    trial = Trial.of(BY_NAME["2x4_everywhere"])
    one, two = left_out(trial, [1]), left_out(trial, [1, 2])

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, trial.case, "ibgda")
        rank = buffer.rank
        for lost, rest in ((1, one), (2, two)):
            if rank == lost:
                buffer.destroy()
            if rank not in range(1, lost + 1):
                buffer.recover([lost])
                round_trip_without(buffer, rank, trial, rest)
            barrier(group)  # a peer may still be in the call that has already ended here

    run_ranks(8, on_each_rank)


def test_more_than_half_of_a_node_is_refused() -> None:
    """It is refused on all ranks with the node named, before anything is changed: the Buffer stays as it was."""
    trial = Trial.of(BY_NAME["2x4_everywhere"])

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, trial.case, "ibgda")
        lost = [5, 6, 7] if buffer.rank < 5 else [1, 2, 3]
        with pytest.raises(ValueError, match=r"expected at most 2 ranks of node [01], or all"):
            buffer.recover(lost)
        round_trip_without(buffer, buffer.rank, trial, trial)

    run_ranks(8, on_each_rank)


def test_rails_keep_a_node_whole() -> None:
    """If only ranks with the same place in their nodes reach each other, no rank can take the place of another, but a
    whole node may be left out.
    """
    trial = Trial.of(BY_NAME["2x4_everywhere"])
    second = [4, 5, 6, 7]

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, trial.case, "ibgda", link=Link(2**30, 2**-10, rails=True))
        if buffer.rank < 4:
            with pytest.raises(
                ValueError, match=r"mask=\[5\]: expected all ranks of node 1 or none: the link .* rails"
            ):
                buffer.recover([5])
        round_trip_without(buffer, buffer.rank, trial, trial)
        barrier(group)
        if buffer.rank in second:
            return buffer.destroy()
        buffer.recover(second)
        round_trip_without(buffer, buffer.rank, trial, left_out(trial, second))

    run_ranks(8, on_each_rank)


@pytest.mark.parametrize("lost", [[1], [0, 3]], ids=["one", "two"])
def test_only_those_talk_that_pass_on_for_each_other(lost: list[int]) -> None:
    """Messages between nodes only go from each rank to its forwarder, and back."""
    trial = Trial.of(BY_NAME["2x2_uniform"])
    rest = left_out(trial, lost)
    # In each node the remaining ranks, in order, stand in for those left out.
    left = [[rank for rank in (2 * node, 2 * node + 1) if rank not in lost] for node in (0, 1)]
    expected = {
        frozenset((rank, peer if peer in left[1 - rank // 2] else left[1 - rank // 2][0]))
        for rank in itertools.chain(*left)
        for peer in [(rank + 2) % 4]
    }

    def on_each_rank(group: Any) -> set[frozenset[int]]:
        buffer = make_buffer(group, trial.case, "ibgda")
        rank = buffer.rank
        barrier(group)
        if rank in lost:
            buffer.destroy()
            return set()
        buffer.recover(lost)
        round_trip_without(buffer, rank, trial, rest)
        return {frozenset((rank, peer)) for peer, sent in enumerate(buffer.network_counters()) if sent["bytes"]}

    for seed in schedules(2):
        talked = set().union(*run_ranks(4, on_each_rank, seed=seed))
        assert talked == expected


def test_arguments_are_those_of_all() -> None:
    """Arguments that concern ranks that are left out are dropped, in every form of call."""
    trial = Trial.of(BY_NAME["2x2_uniform"])
    rest = left_out(trial, [2])

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, trial.case, "ibgda")
        rank = buffer.rank
        if rank == 2:
            buffer.destroy()
            return
        buffer.recover([2])
        first = buffer.dispatch(**dispatch_arguments(trial.work, rank), async_finish=True)
        combined = rest.combine(buffer, rank, first[4], 1, async_finish=True)
        again = buffer.dispatch(trial.work.x[rank], handle=first[4], async_finish=True)
        again[5].current_stream_wait()
        rest.check_cached(rank, again)
        combined[2].current_stream_wait()
        rest.check_combine(rank, combined, 1)

    for seed in schedules(2):
        run_ranks(4, on_each_rank, seed=seed)
