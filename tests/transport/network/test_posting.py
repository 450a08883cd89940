"""The kernel that only posts puts, which bench-posting times: its puts arrive and are counted."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import deep_ep_py as deep_ep
from cases import BY_NAME
from deep_ep_py.base.native import C
from deep_ep_py.testing import run_ranks
from harness import HARSH_NIC, RETRIES_EXCEEDED, failing, make_buffer, under_schedules

CASE = BY_NAME["two_ranks"]
BLOCKS, POSTERS, PUTS, BYTES = 2, 2, 9, 96


def post(group: Any, nic: deep_ep.NicOptions) -> tuple[deep_ep.Buffer, Any, torch.Tensor, torch.Tensor]:
    """Post from rank 0 to rank 1. Returns the Buffer, the ended call, and the data and words of the rank."""
    buffer = make_buffer(group, CASE, "ibgda", nic=nic)
    data = buffer._engine.empty((BLOCKS * POSTERS + 1, BYTES // 8), torch.int64)
    words = buffer._engine.empty((BLOCKS * POSTERS,), torch.int64).zero_()
    data.copy_(torch.arange(BYTES // 8) * (1 - buffer.rank))
    runtime = buffer.runtime
    there = group.all_gather_object([runtime.heap_offset(tensor.data_ptr()) for tensor in (data, words)])[1]
    if buffer.rank == 1:
        return buffer, None, data, words
    source = runtime.heap_offset(data.data_ptr())
    call = C.measure.post(
        buffer._engine.runtime,
        to=1,
        posters=POSTERS,
        puts=PUTS,
        bytes=BYTES,
        source=source,
        target=there[0],
        words=there[1],
        blocks=BLOCKS,
    )
    runtime.wait(call)
    return buffer, call, data, words


def test_what_is_posted_arrives() -> None:
    """Send queues fill up, on two queue pairs."""

    def on_each_rank(group: Any) -> None:
        buffer, call, data, words = post(group, HARSH_NIC)
        if buffer.rank == 0:
            buffer._engine.check_failure(call)
            buffer.runtime.retire(call)
            buffer.runtime.drain()
            sent = buffer.network_counters()[1]
            posted = BLOCKS * POSTERS * PUTS
            assert (sent["writes"], sent["atomics"], sent["bytes"]) == (posted, posted, posted * BYTES)
            assert 0 < sent["doorbells"] <= posted
        group.barrier()
        if buffer.rank == 1:
            assert words.tolist() == [PUTS * C.SIGNAL_UNIT] * (BLOCKS * POSTERS)
            assert data[:-1].tolist() == [list(range(BYTES // 8))] * (BLOCKS * POSTERS) and not data[-1].any()

    under_schedules(2, on_each_rank)


def test_a_nic_that_fails() -> None:
    def on_each_rank(group: Any) -> None:
        buffer, call, _, _ = post(group, failing(0, 1, 5, RETRIES_EXCEEDED))
        if buffer.rank == 0:
            with pytest.raises(deep_ep.DeepEPError, match=r"the NIC reports an error of work request \d+ to rank 1"):
                buffer._engine.check_failure(call)
        group.barrier()

    under_schedules(2, on_each_rank)


@pytest.mark.once
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"to": 2}, "to=2: expected 0 to 1"),
        ({"posters": 0}, "posters=0: expected 1 to "),
        ({"bytes": 8}, "bytes=8: expected a multiple of 16, at most "),
        ({"source": 0}, "source=0: expected 96 bytes within an arena"),
        ({"target": 1 << 50}, f"target={1 << 50}: expected 96 bytes within an arena"),
        ({"words": 4}, "words=4: expected 8 bytes within an arena"),
    ],
)
def test_bad_arguments_are_refused(changed: dict[str, int], message: str) -> None:
    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, CASE, "ibgda")
        inside = buffer.runtime.heap_offset(buffer._engine.empty((64,), torch.int64).data_ptr())
        right = {"posters": 1, "puts": 1, "bytes": 96, "source": inside, "target": inside, "words": inside}
        right["to"] = 1 - group.rank()
        with pytest.raises(ValueError, match=re.escape(message)):
            C.measure.post(buffer._engine.runtime, **{**right, "blocks": 1, **changed})

    run_ranks(2, on_each_rank)


@pytest.mark.once
def test_a_mapped_rank_is_refused() -> None:
    """Its signal words are not in the part of its heap that has the arena."""

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, CASE, "ibgda")
        inside = buffer.runtime.heap_offset(buffer._engine.empty((64,), torch.int64).data_ptr())
        right = {"posters": 1, "puts": 1, "bytes": 96, "source": inside, "target": inside, "words": inside, "blocks": 1}
        with pytest.raises(ValueError, match="expected a rank that is not mapped"):
            C.measure.post(buffer._engine.runtime, to=group.rank(), **right)

    run_ranks(2, on_each_rank)
