"""Network traffic of two-hop mode, as counted by the NICs: a row crosses once per node, only between ranks of the same
place in their nodes; the number of messages grows with nodes and chunks, not with ranks or tokens."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest

import deep_ep_py as deep_ep
from cases import Case, build
from deep_ep_py.testing import run_ranks
from harness import Trial, dispatch_arguments, make_buffer
from oracle import Workload

pytestmark = pytest.mark.once

PHASES = ("dispatch", "cached", "combine")
SIGNALS = {"dispatch": 3, "cached": 2, "combine": 2}
"""Messages to a peer if a row stream is one chunk: the counts, only in a dispatch; the chunk; the region's release."""

# So much room that each row stream is one chunk, whatever the size of its rows.
CASES = [
    Case("2x1", 2, (9, 14), topk=2, experts=4, ranks_per_node=1, hops=2),
    Case("2x2", 4, (12, 0, 7, 20), topk=4, experts=16, ranks_per_node=2),
    Case("3x2", 6, 8, topk=3, experts=12, routing="skewed", ranks_per_node=2),
    Case("2x4", 8, 6, topk=4, experts=16, routing="holes", ranks_per_node=4),
    Case("4x2", 8, 6, topk=6, experts=16, ranks_per_node=2),
    Case("2x8", 16, 4, topk=8, experts=32, ranks_per_node=8),
]
CASES = [replace(case, hidden=8, num_nvl_bytes=8 << 20) for case in CASES]
each_case = pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])

Counters = dict[str, int]


def work_of(case: Case) -> Workload:
    """Return work with the same routes for any size of rows."""
    narrow = build(replace(case, hidden=8))
    return replace(narrow, x=[x.repeat(1, case.hidden // 8) for x in narrow.x])


@functools.cache
def counted(case: Case) -> list[dict[str, list[Counters]]]:
    """Return by rank and phase the counters of what it sends to each peer."""
    trial = Trial.of_workload(case, work_of(case))

    def on_each_rank(group: Any) -> dict[str, list[Counters]]:
        buffer = make_buffer(group, case, "ibgda", nic=deep_ep.NicOptions())
        rank, phases = buffer.rank, {}
        sent = buffer.network_counters()

        def end_of(phase: str) -> None:
            nonlocal sent
            buffer.runtime.drain()  # the release of the region, for which no operation waits
            before, sent = sent, buffer.network_counters()
            phases[phase] = [{name: now[name] - was[name] for name in now} for now, was in zip(sent, before)]

        results = buffer.dispatch(**dispatch_arguments(trial.work, rank))
        end_of("dispatch")
        trial.check_dispatch(rank, results)
        trial.check_cached(rank, buffer.dispatch(trial.work.x[rank], handle=results[4]))
        end_of("cached")
        trial.check_combine(rank, trial.combine(buffer, rank, results[4]))
        end_of("combine")
        return phases

    return list(run_ranks(case.ranks, on_each_rank))


def rows_sent(case: Case) -> list[dict[str, list[int]]]:
    """Return by rank and phase the number of rows that go to each peer, without knowing the size of a message. It
    follows from the growth of the traffic with longer rows; all other traffic only depends on the number of rows."""
    longer = replace(case, hidden=case.hidden + 16)
    rows = []
    for few, many in zip(counted(case), counted(longer)):
        grown = {
            phase: [after["bytes"] - before["bytes"] for before, after in zip(few[phase], many[phase])]
            for phase in PHASES
        }
        assert all(more % 32 == 0 for phase in PHASES for more in grown[phase])
        assert all(
            [peer["atomics"] for peer in few[phase]] == [peer["atomics"] for peer in many[phase]] for phase in PHASES
        )
        rows.append({phase: [more // 32 for more in grown[phase]] for phase in PHASES})
    return rows


def destinations(case: Case, ranks_of_one: int) -> list[list[int]]:
    """Return by source and destination, each a group of `ranks_of_one` consecutive ranks, the tokens that go there,
    each counted once."""
    work = work_of(case)
    experts = work.experts_per_rank * ranks_of_one
    there = [[0] * (case.ranks // ranks_of_one) for _ in range(case.ranks)]
    for source, topk_idx in enumerate(work.topk_idx):
        for row in topk_idx.tolist():
            for destination in {expert // experts for expert in row if expert >= 0}:
                there[source][destination] += 1
    return there


@each_case
def test_a_row_crosses_once_for_each_node(case: Case) -> None:
    """So does the sum of a token on its way back."""
    per_node = case.ranks_per_node or 1
    to_node = destinations(case, per_node)
    for rank, rows in enumerate(rows_sent(case)):
        node, place = divmod(rank, per_node)
        far = [peer % per_node == place and peer // per_node != node for peer in range(case.ranks)]
        there = [to_node[rank][peer // per_node] * far[peer] for peer in range(case.ranks)]
        back = [to_node[peer][node] * far[peer] for peer in range(case.ranks)]
        assert rows == {"dispatch": there, "cached": there, "combine": back}, rank


@each_case
def test_one_hop_for_comparison(case: Case) -> None:
    """A row crosses once for each rank, which also shows that rows are counted correctly."""
    per_node = case.ranks_per_node or 1
    to_rank = destinations(case, 1)
    for rank, rows in enumerate(rows_sent(replace(case, hops=1))):
        far = [peer // per_node != rank // per_node for peer in range(case.ranks)]
        there = [to_rank[rank][peer] * far[peer] for peer in range(case.ranks)]
        back = [to_rank[peer][rank] * far[peer] for peer in range(case.ranks)]
        assert rows == {"dispatch": there, "cached": there, "combine": back}, rank


@each_case
def test_peers_and_messages_follow_nodes(case: Case) -> None:
    """Nothing at all is sent to ranks other than those of the same place in other nodes."""
    per_node = case.ranks_per_node or 1
    for rank, phases in enumerate(counted(case)):
        for phase, peers in phases.items():
            for peer, sent in enumerate(peers):
                if peer % per_node == rank % per_node and peer != rank:
                    assert sent["atomics"] == SIGNALS[phase] and sent["writes"], (rank, phase, peer, sent)
                else:
                    assert not any(sent.values()), (rank, phase, peer, sent)


def test_eight_nodes_of_eight() -> None:
    """7 peers instead of 63, regardless of tokens and experts."""
    case = Case("8x8", 64, 2, hidden=8, topk=2, experts=64, ranks_per_node=8, num_nvl_bytes=8 << 20)
    test_peers_and_messages_follow_nodes(case)
    test_peers_and_messages_follow_nodes(replace(case, tokens=5, topk=6, experts=128))


@pytest.mark.slow
@pytest.mark.thorough
def test_thirty_two_nodes_of_eight() -> None:
    """31 peers instead of 255, each with as many messages as between two nodes."""
    sizes = {"hidden": 8, "topk": 2, "experts": 256, "num_nvl_bytes": 8 << 20, "max_blocks": 2}
    test_peers_and_messages_follow_nodes(Case("32x8", 256, 2, ranks_per_node=8, **sizes))


# --- bytes ----------------------------------------------------------------------------------------------------------

HEADER, RANK_MASK = 64, 128


def pieces(size: int) -> int:
    """Return the bytes of a part of a message."""
    return -(-size // 16) * 16


def counts_bytes(case: Case) -> int:
    """Return the bytes of counts to a forwarder: rows for each rank of its node, and for each expert there."""
    per_node = case.ranks_per_node or 1
    return HEADER + RANK_MASK + pieces(4 * per_node) + pieces(4 * case.experts // case.nodes)


def chunk_bytes(case: Case, phase: str, rows: int) -> int:
    """Return the bytes of a chunk of `rows` node rows between nodes."""
    per_node = case.ranks_per_node or 1
    # In a dispatch: the index of the first row for each rank, and the set of ranks of each node row.
    routes = pieces(4 * per_node) + pieces(4 * rows * -(-per_node // 32))
    ids, weights, tokens = pieces(8 * case.topk * rows), pieces(4 * case.topk * rows), pieces(4 * rows)
    parts = {"dispatch": ids + weights + tokens + routes, "cached": routes, "combine": weights}
    return HEADER + 2 * case.hidden * rows + parts[phase]


@each_case
def test_nothing_else_crosses(case: Case) -> None:
    """The bytes of each message follow the layout in `csrc/wire/two_hops.h`."""
    rows = rows_sent(case)
    for rank, phases in enumerate(counted(case)):
        for phase, peers in phases.items():
            for peer, sent in enumerate(peers):
                if sent["atomics"]:
                    expected = chunk_bytes(case, phase, rows[rank][phase][peer])
                    expected += counts_bytes(case) * (phase == "dispatch")
                    assert sent["bytes"] == expected, (rank, phase, peer)
