"""The number of messages of low-latency calls, as counted by the NICs: it only grows with the number of peers."""

from __future__ import annotations

from typing import Any

import pytest

import deep_ep_py as deep_ep
from deep_ep_py.testing import run_ranks
from low_latency import Sizes, Work, combine, dispatch, make_buffer

pytestmark = pytest.mark.once

MAX_PUTS, MAX_DOORBELLS = 4, 2
FREE = 1  # a signal to each peer that belongs to no phase
PHASES = ("dispatch", "combine")


@pytest.mark.parametrize("ranks", [8, 32, 64])
def test_puts_and_doorbells_of_a_full_batch(ranks: int) -> None:
    """128 tokens, top-8: each peer gets its routing and rows, and later its results."""
    sizes = Sizes("full", ranks, (128,) * ranks, 128, 16, 8, 4 * ranks)
    work = Work.of(sizes, results=False)

    def on_each_rank(group: Any) -> dict[str, list[dict[str, int]]]:
        nic = deep_ep.NicOptions(blocks=64, max_bytes=1 << 20)
        counted = []
        with make_buffer(group, sizes, "ibgda", nic=nic, arena_bytes=32 << 20) as buffer:
            counted.append(buffer.network_counters())
            results = dispatch(buffer, work)
            buffer.runtime.drain()
            counted.append(buffer.network_counters())
            combine(buffer, work, results[2], results[0])
            buffer.runtime.drain()
            counted.append(buffer.network_counters())
        return {
            phase: [{name: now[name] - was[name] for name in now} for now, was in zip(after, before, strict=True)]
            for phase, before, after in zip(PHASES, counted[:-1], counted[1:], strict=True)
        }

    for rank, phases in enumerate(run_ranks(ranks, on_each_rank)):
        for phase in PHASES:
            for peer, sent in enumerate(phases[phase]):
                if peer == rank:
                    assert not any(sent.values())
                    continue
                assert sent["atomics"] - FREE <= MAX_PUTS and sent["doorbells"] - FREE <= MAX_DOORBELLS, sent
                assert sent["atomics"] == FREE + (2 if phase == "dispatch" else 1)
