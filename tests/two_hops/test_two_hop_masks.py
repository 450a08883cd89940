"""Two hops without some ranks (P17): another rank of the node passes on what a rank that is left out would have."""

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
    """Parametrize by them; a sanitizer's build, in which they take ten times as long, has one of three."""
    cases = cases[::-3] if SANITIZED else cases
    names = [f"{case.name}_without_{'_'.join(map(str, lost))}" for case, lost in cases]
    return pytest.mark.parametrize(("case", "lost"), cases, ids=names)


def go_on_without(group: Any, case: Case, fabric: str, trial: Trial, rest: Trial, lost: list[int]) -> None:
    """On every rank: one round trip of all, then two without some."""
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


# In the last ones a rank whose own place is another's in some node has the place of a third in its own.
IN_CHUNKS = [
    (Case("4x2", 8, (13, 31, 17, 0, 29, 8, 32, 16), topk=4, experts=16, ranks_per_node=2, **BASE), [0, 2, 3, 5]),
    (Case("2x3", 6, (38, 29, 33, 31, 27, 41), topk=4, experts=12, ranks_per_node=3, **BASE), [2, 3]),
    (Case("2x4", 8, (38, 29, 33, 31, 27, 41, 25, 35), topk=4, experts=16, ranks_per_node=4, **BASE), [3, 4]),
]


@pytest.mark.parametrize("arena_bytes", [None, 0], ids=["arena", "local_chunks"])
@pytest.mark.parametrize("fabric", FABRICS)
@named(IN_CHUNKS)
def test_in_many_chunks(case: Case, lost: list[int], fabric: str, arena_bytes: int | None) -> None:
    """Of the least rows that there may be, so that slots of both roles are given back many times."""
    try_without(cramped(replace(case, arena_bytes=arena_bytes), fabric, 2.0), lost, fabric, PROTOCOL_SCHEDULES)


@pytest.mark.once
def test_whatever_ranks_are_left_out() -> None:
    """At most half of each node, or all of it: twenty draws."""
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
    """One rank after the other: who passes on for whom changes with each."""
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
            barrier(group)  # a peer may still be in the call that has ended here

    run_ranks(8, on_each_rank)


def test_more_than_half_of_a_node_is_refused() -> None:
    """By name, on all ranks, before anything is changed: the Buffer is as it was."""
    trial = Trial.of(BY_NAME["2x4_everywhere"])

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, trial.case, "ibgda")
        lost = [5, 6, 7] if buffer.rank < 5 else [1, 2, 3]
        with pytest.raises(ValueError, match=r"expected at most 2 ranks of node [01], or all"):
            buffer.recover(lost)
        round_trip_without(buffer, buffer.rank, trial, trial)

    run_ranks(8, on_each_rank)


def test_rails_keep_a_node_whole() -> None:
    """Where only ranks with the same place in their nodes reach each other, none takes another's place; but a node may
    go.
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
    """Messages between nodes: from each rank to the one that passes on for it, and back."""
    trial = Trial.of(BY_NAME["2x2_uniform"])
    rest = left_out(trial, lost)
    # Of each node the ranks left, in their order, stand for those left out.
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
    """What a call is given for ranks that are left out is dropped, in every way of calling."""
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
