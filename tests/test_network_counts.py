"""How many messages an operation takes, as the NICs count them: they grow with peers and chunks, not with tokens."""

from __future__ import annotations

from typing import Any

import pytest

import deep_ep_py as deep_ep
from cases import Case
from deep_ep_py.testing import run_ranks
from harness import Trial, dispatch_arguments, make_buffer

pytestmark = pytest.mark.once

NIC = deep_ep.NicOptions(traced=True)


def count(ranks: int, tokens: int, topk: int) -> list[dict[str, list[int]]]:
    """By rank: puts to each peer of a dispatch and of its combine."""
    # Few bytes, so that all rows of a stream are one chunk.
    case = Case("counted", ranks, tokens, hidden=8, topk=topk, experts=2 * ranks, num_nvl_bytes=8 << 20)
    trial = Trial.of(case)

    def on_each_rank(group: Any) -> dict[str, list[int]]:
        buffer = make_buffer(group, case, "ibgda", nic=NIC)
        rank = buffer.rank
        results = buffer.dispatch(**dispatch_arguments(trial.work, rank))
        buffer.runtime.drain()  # what no operation waits for: the region given back
        after_dispatch = [peer["atomics"] for peer in buffer.network_counters()]
        trial.check_dispatch(rank, results)
        trial.check_combine(rank, trial.combine(buffer, rank, results[4]))
        buffer.runtime.drain()  # what no operation waits for: the region given back
        after_combine = [peer["atomics"] for peer in buffer.network_counters()]
        trace = buffer.network_trace()
        assert len(trace) == sum(peer["atomics"] + peer["writes"] for peer in buffer.network_counters())
        assert {message["source"] for message in trace} == {rank}
        return {
            "dispatch": after_dispatch,
            "combine": [after - before for after, before in zip(after_combine, after_dispatch)],
        }

    return run_ranks(ranks, on_each_rank)


@pytest.mark.parametrize("ranks", [8, 32, 64])
def test_messages_grow_with_peers_and_chunks_only(ranks: int) -> None:
    few, many, more_experts = count(ranks, 4, 2), count(ranks, 16, 2), count(ranks, 16, 8)
    assert few == many == more_experts, "tokens and experts do not count"
    for rank, phases in enumerate(few):
        for peer in range(ranks):
            far = int(peer != rank)
            # Counts, one chunk, and the region given back; a combine has no counts.
            assert phases["dispatch"][peer] == 3 * far and phases["combine"][peer] == 2 * far, (rank, peer, phases)
