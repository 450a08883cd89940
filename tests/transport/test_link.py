"""How chunks between nodes follow from the properties of the link, and how much memory they need."""

from __future__ import annotations

import re
from math import ceil
from typing import Any

import pytest

import deep_ep_py as deep_ep
from deep_ep_py.base.native import C
from deep_ep_py.testing import run_ranks
from deep_ep_py.transport.topology.link import SOFTWARE
from places import ROOT

INFINIBAND, EFA = deep_ep.Link(50e9, 10e-6), deep_ep.Link(50e9, 25e-6)
ROWS = {"hidden_bytes": 2 * 7168, "num_topk": 8}
"""A row of DeepSeek-V3: x, 8 ids of 8 bytes with weights of 4 bytes, and one word each for the index of the token and
its ranks."""
ROW_BYTES = 2 * 7168 + 8 * (8 + 4) + 4 + 4
REGIONS = 2


@pytest.mark.parametrize("link", [INFINIBAND, EFA, SOFTWARE], ids=["infiniband", "efa", "software"])
@pytest.mark.parametrize("nodes", [2, 3, 4, 8, 32, 128])
def test_chunks_hold_bandwidth_times_round_trip(link: deep_ep.Link, nodes: int) -> None:
    rows, _ = link.staging(**ROWS, num_experts=8 * nodes, num_ranks=8 * nodes, ranks_per_node=8)
    in_flight = link.bandwidth * link.round_trip
    wanted = ceil(in_flight / ((nodes - 1) * C.two_hops.SLOTS * ROW_BYTES))
    # No larger than the size up to which puts become more efficient.
    assert rows == min(wanted, C.two_hops.MAX_CHUNK_BYTES // (ROW_BYTES + 32))
    if wanted == rows:
        assert (nodes - 1) * C.two_hops.SLOTS * rows * ROW_BYTES >= in_flight


def test_chunks_of_short_rows_are_bounded() -> None:
    rows, _ = SOFTWARE.staging(16, 1, 16, 16, 8)
    assert rows == C.two_hops.MAX_CHUNK_ROWS


def test_bytes_in_flight() -> None:
    assert deep_ep.Link(50e9, 20e-6).bytes_in_flight == 1_000_000
    assert deep_ep.Link(12.5e9, 10.1e-6).bytes_in_flight == 126_250


@pytest.mark.parametrize("link", [INFINIBAND, EFA, SOFTWARE], ids=["infiniband", "efa", "software"])
def test_staging_of_8_nodes_of_8_ranks(link: deep_ep.Link) -> None:
    rows, region = link.staging(**ROWS, num_experts=256, num_ranks=64, ranks_per_node=8)
    assert REGIONS * region <= 64 << 20
    # The formula: slots at both ends of the row streams between nodes, two for each row stream inside.
    formula = (2 * 7 * C.two_hops.SLOTS + 64 * 2) * rows * ROW_BYTES
    assert formula <= region <= 1.03 * formula + (1 << 18)


def test_the_table_of_the_docs() -> None:
    text = (ROOT / "docs" / "two_hops.md").read_text()
    rows = re.findall(r"^\| (\d+) \| (\d+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", text, re.MULTILINE)
    assert len(rows) == 6
    for ranks, per_node, *table in rows:
        experts = max(256, int(ranks))
        for link, mebibytes in zip((INFINIBAND, deep_ep.Link(50e9, 25e-6), SOFTWARE), table, strict=True):
            _, region = link.staging(2 * 7168, 8, experts, int(ranks), int(per_node))
            assert f"{REGIONS * region / 2**20:.1f}" == mebibytes


def test_memory_is_linear_in_nodes() -> None:
    def region(nodes: int) -> int:
        return INFINIBAND.staging(2 * 7168, 8, 1024 // (8 * nodes) * 8 * nodes, 8 * nodes, 8)[1]

    assert region(128) - region(64) <= 1.01 * 64 * (region(64) - region(63))  # all have chunks of one row


@pytest.mark.parametrize("name", ["bandwidth", "round_trip"])
def test_what_is_no_link_is_refused(name: str) -> None:
    values: list[Any] = [0.0, -1.0, float("nan"), float("inf")]
    for value in values:
        with pytest.raises(ValueError, match=rf"link\.{name}={value!r}: expected"):
            deep_ep.Link(**{name: value})
    for value in ["1", None, True]:
        with pytest.raises(TypeError, match=rf"link\.{name}={value!r}: expected a number"):
            deep_ep.Link(**{name: value})


def buffer_with(group: Any, link: Any) -> deep_ep.Buffer:
    return deep_ep.Buffer(group, 1 << 22, device="cpu", fabric="ibgda", ranks_per_node=2, link=link, timeout=30.0)


def test_a_buffer_cuts_chunks_as_its_link_asks() -> None:
    def on_each_rank(group: Any) -> None:
        sizes = C.normal.Sizes(16, 1024, 2, 8)
        for link, rows in ((deep_ep.Link(1e9, 20e-6), 5), (deep_ep.Link(1e9, 40e-6), 10)):
            buffer = buffer_with(group, link)
            assert C.two_hops.chunk_rows(buffer._engine.runtime, sizes) == rows
            buffer.destroy()

    run_ranks(4, on_each_rank, seed=1)


def test_ranks_agree_on_it() -> None:
    def on_each_rank(group: Any) -> None:
        with pytest.raises(ValueError, match=r"link\.round_trip=.*: expected the same on all ranks"):
            buffer_with(group, deep_ep.Link(50e9, 1e-6 * (1 + group.rank())))
        with pytest.raises(TypeError, match="link=3: expected a Link"):
            buffer_with(group, 3)

    run_ranks(4, on_each_rank, seed=1)
