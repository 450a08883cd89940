"""Lost links and failed requests: every rank raises, and one reports the error of the NIC."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from failing_links import TRIAL, errors
from harness import HARSH_NIC, RETRIES_EXCEEDED, dispatch_arguments, failing, make_buffer, under_schedules

REMOTE_ACCESS = 0x13


@pytest.mark.parametrize("after", [0, 3, 40, 200])
@pytest.mark.parametrize("syndrome", [RETRIES_EXCEEDED, REMOTE_ACCESS])
def test_an_error_that_the_nic_reports(syndrome: int, after: int) -> None:
    """At once: no rank waits for a timeout. The rank that owns the NIC names the request, the peer and the syndrome."""
    said, clock_jumps = errors("ibgda", failing(1, 2, after, syndrome))
    assert clock_jumps == 0
    for rank, message in enumerate(said):
        rank %= TRIAL.case.ranks
        if rank == 1:
            assert "DeepEPError: rank 1: " in message and "the NIC reports an error of work request" in message, message
            assert "to rank 2" in message and f"syndrome {syndrome:#04x}" in message, message
        else:
            assert "because rank 1 was told by its NIC that it cannot send to rank 2" in message, message


def test_an_error_whose_completion_is_overwritten() -> None:
    """By that of requests behind it, as on a ConnectX: the message does not blame the flush."""
    said, clock_jumps = errors("ibgda", replace(failing(1, 2, 3, RETRIES_EXCEEDED), fault_flushes=True))
    assert clock_jumps == 0
    of_nic = [message for rank, message in enumerate(said) if rank % TRIAL.case.ranks == 1]
    flushed = [message for message in of_nic if "to rank 2 after an earlier error, which its completion no" in message]
    seen = [message for message in of_nic if "to rank 2: retries exceeded" in message]
    assert flushed and len(flushed) + len(seen) == len(of_nic), of_nic


@pytest.mark.parametrize("fabric", ["ibgda", "proxy"])
def test_a_link_that_is_silent(fabric: str) -> None:
    """Some bounded wait times out; its error says what it waited for from which rank, and the others are notified."""
    said, _ = errors(fabric, failing(1, 2, 3, 0), timeout=2.0)
    ranks = TRIAL.case.ranks
    for begin in range(0, len(said), ranks):
        run = said[begin : begin + ranks]
        timeouts = [message for message in run if message.startswith("DeepEPTimeout")]
        assert timeouts, run
        assert all("gave up in" in message and "waited for" in message for message in timeouts), timeouts
        others = [message for message in run if message not in timeouts]
        assert all("ended because rank" in message for message in others), others


def test_all_links_of_a_rank() -> None:
    said, clock_jumps = errors("ibgda", failing(0, -1, 10, RETRIES_EXCEEDED))
    assert clock_jumps == 0
    assert all("NIC" in message for message in said), said


@pytest.mark.parametrize("key_offset", [0, 1072, 4080])
def test_requests_end_where_keys_do(key_offset: int) -> None:
    """The NIC would refuse a request that crosses the end of a key."""
    nic = replace(HARSH_NIC, chunk_log2=12, key_offset=key_offset)

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, TRIAL.case, "ibgda", arena_bytes=1 << 16, nic=nic)
        TRIAL.check_dispatch(buffer.rank, buffer.dispatch(**dispatch_arguments(TRIAL.work, buffer.rank)))

    under_schedules(TRIAL.case.ranks, on_each_rank)  # requests must be split where keys end
