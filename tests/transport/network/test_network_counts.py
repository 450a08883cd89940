"""The number of messages of an operation, as counted by the NICs: it grows with peers and chunks, not with tokens."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import deep_ep_py as deep_ep
from cases import BY_NAME, Case, tight
from deep_ep_py.testing import run_ranks
from deep_ep_py.transport.topology.nic import save_trace
from harness import Trial, dispatch_arguments, make_buffer

pytestmark = pytest.mark.once

NIC = deep_ep.NicOptions(traced=True)


def count(ranks: int, tokens: int, topk: int) -> list[dict[str, list[int]]]:
    """Return by rank the number of puts to each peer in a dispatch and its combine."""
    # Rows have few bytes, so that all rows of a stream fit in one chunk.
    case = Case("counted", ranks, tokens, hidden=8, topk=topk, experts=2 * ranks, num_nvl_bytes=8 << 20)
    trial = Trial.of(case)

    def on_each_rank(group: Any) -> dict[str, list[int]]:
        buffer = make_buffer(group, case, "ibgda", nic=NIC)
        rank = buffer.rank
        results = buffer.dispatch(**dispatch_arguments(trial.work, rank))
        buffer.runtime.drain()  # the release of the region, for which no operation waits
        after_dispatch = [peer["atomics"] for peer in buffer.network_counters()]
        trial.check_dispatch(rank, results)
        trial.check_combine(rank, trial.combine(buffer, rank, results[4]))
        buffer.runtime.drain()  # the release of the region, for which no operation waits
        after_combine = [peer["atomics"] for peer in buffer.network_counters()]
        trace = buffer.network_trace()
        assert len(trace) == sum(peer["atomics"] + peer["writes"] for peer in buffer.network_counters())
        assert {message["source"] for message in trace} == {rank}
        return {
            "dispatch": after_dispatch,
            "combine": [after - before for after, before in zip(after_combine, after_dispatch)],
        }

    return run_ranks(ranks, on_each_rank)


@pytest.mark.parametrize("ranks", [8, 32, pytest.param(64, marks=pytest.mark.thorough)])
def test_messages_grow_with_peers_and_chunks_only(ranks: int) -> None:
    few, many, more_experts = count(ranks, 4, 2), count(ranks, 16, 2), count(ranks, 16, 8)
    assert few == many == more_experts, "tokens and experts must not matter"
    for rank, phases in enumerate(few):
        for peer in range(ranks):
            far = int(peer != rank)
            # Counts, one chunk, and the region's release; a combine has no counts.
            assert phases["dispatch"][peer] == 3 * far and phases["combine"][peer] == 2 * far, (rank, peer, phases)


@pytest.mark.parametrize("ranks, queues", [(4, 2), (8, 4)])
def test_every_queue_pair_carries_puts(ranks: int, queues: int) -> None:
    """In normal mode, to each peer. Even if the number of ranks is a power of two, the words of a source must not all
    map to one queue pair, and thus to one NIC."""
    # Chunks of few rows, so that each stream uses all of its slots.
    room = tight(ranks, 8, 2, 2 * ranks)
    case = Case("spread", ranks, 64, hidden=8, topk=2, experts=2 * ranks, num_nvl_bytes=room)
    trial = Trial.of(case)

    def on_each_rank(group: Any) -> set[tuple[int, int]]:
        nic = deep_ep.NicOptions(traced=True, queues_per_peer=queues)
        buffer = make_buffer(group, case, "ibgda", nic=nic)
        rank = buffer.rank
        for _ in range(2):
            results = buffer.dispatch(**dispatch_arguments(trial.work, rank))
            trial.check_combine(rank, trial.combine(buffer, rank, results[4]))
        buffer.runtime.drain()
        return {(message["destination"], message["queue"]) for message in buffer.network_trace()}

    for rank, used in enumerate(run_ranks(ranks, on_each_rank)):
        per_peer = {peer: sum(destination == peer for destination, _ in used) for peer in range(ranks) if peer != rank}
        assert all(count == queues for count in per_peer.values()), (rank, per_peer)


def test_a_trace_in_a_file(tmp_path: Path) -> None:
    """One line for each request, in the order of time, of all ranks."""
    trial = Trial.of(BY_NAME["two_ranks"])

    def on_each_rank(group: Any) -> list[dict[str, int]]:
        buffer = make_buffer(group, trial.case, "ibgda", nic=NIC)
        buffer.dispatch(**dispatch_arguments(trial.work, buffer.rank))
        buffer.runtime.drain()
        return buffer.network_trace()

    traces = run_ranks(2, on_each_rank)
    save_trace(traces[0] + traces[1], tmp_path / "trace.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "trace.jsonl").read_text().splitlines()]
    assert len(lines) == len(traces[0]) + len(traces[1]) > 0
    assert [line["time_ns"] for line in lines] == sorted(line["time_ns"] for line in lines)
    assert {(line["source"], line["destination"]) for line in lines} == {(0, 1), (1, 0)}
    assert {line["opcode"] for line in lines} == {0x08, 0x12}, "writes and atomics"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"blocks": 12}, "blocks=12: expected a power of two"),
        ({"blocks": 4}, "blocks=4: expected 8 to 32768"),
        ({"mtu": 40}, "mtu=40: expected a multiple of 16"),
        ({"queues_per_peer": 0}, "queues_per_peer=0: expected 1 to 64"),
        ({"key_offset": -16}, "key_offset=-16: expected 0 to 1073741823"),
        ({"key_offset": 4096, "chunk_log2": 12}, "key_offset=4096: expected 0 to 4095"),
        ({"key_offset": 8}, "key_offset=8: expected a multiple of 16"),
    ],
)
def test_bad_options_are_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        deep_ep.NicOptions(**options)


def test_rows_that_no_send_queue_holds() -> None:
    """They are refused before anything is launched, without side effects."""
    wide = Trial.of(Case("wide", 2, 5, hidden=4096, topk=2, experts=4, num_nvl_bytes=1 << 20))
    narrow = Trial.of(BY_NAME["two_ranks"])

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, wide.case, "ibgda", nic=deep_ep.NicOptions(blocks=8, max_bytes=1024))
        with pytest.raises(ValueError, match=r"nic: a send queue holds \d+ bytes at once, expected at least"):
            buffer.dispatch(**dispatch_arguments(wide.work, buffer.rank))
        narrow.check_dispatch(buffer.rank, buffer.dispatch(**dispatch_arguments(narrow.work, buffer.rank)))

    run_ranks(2, on_each_rank)


def test_nodes_of_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are no messages within a node nor, with two hops, between ranks of different places in their nodes. The
    layout counts nodes. The environment variable has the same effect as the argument."""
    trial = Trial.of(replace(BY_NAME["uniform"], ranks_per_node=2))

    def on_each_rank(group: Any, **options: Any) -> tuple[list[int], list[int]]:
        buffer = deep_ep.Buffer(group, 1 << 20, **options)
        layout = buffer.get_dispatch_layout(trial.work.topk_idx[buffer.rank], trial.work.num_experts)
        trial.check_dispatch(buffer.rank, buffer.dispatch(**dispatch_arguments(trial.work, buffer.rank)))
        expected = layout[3].view(-1, 2, 2).any(2).sum(0)
        assert torch.equal(layout[1], expected.int())
        buffer.runtime.drain()
        return [peer["atomics"] for peer in buffer.network_counters()], expected.tolist()

    by_argument = run_ranks(4, on_each_rank, ranks_per_node=2)
    for rank, (puts, _) in enumerate(by_argument):
        assert [peer for peer in range(4) if puts[peer]] == [(rank + 2) % 4]
    monkeypatch.setenv("DEEP_EP_RANKS_PER_NODE", "2")
    assert list(run_ranks(4, on_each_rank)) == list(by_argument)
    with pytest.raises(ValueError, match="ranks_per_node=3: expected a divisor of the 4 ranks"):
        run_ranks(4, on_each_rank, ranks_per_node=3)
