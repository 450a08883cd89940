"""The proxy over its loopback: links that fail, and a link that accepts nothing but delays no other."""

from __future__ import annotations

import re
from typing import Any

import pytest

import deep_ep_py as deep_ep
from cases import BY_NAME, Case
from failing_links import TRIAL, errors
from harness import Trial, barrier, dispatch_arguments, failing, make_buffer, round_trip_without, under_schedules
from native_programs import build_protocol, run

ERROR = 5


@pytest.mark.parametrize("after", [0, 3, 40])
def test_a_link_that_fails(after: int) -> None:
    """At once. The rank that owns the link names the peer and the error of the transport; the others name that rank."""
    said, clock_jumps = errors("proxy", failing(1, 2, after, ERROR))
    assert clock_jumps == 0
    for rank, message in enumerate(said):
        if rank % TRIAL.case.ranks == 1:
            assert "the proxy cannot send to rank 2 over the loopback: error 5, as asked for" in message, message
        else:
            assert "because rank 1 was told by its NIC that it cannot send to rank 2" in message, message


def test_p11_a_peer_that_takes_nothing_holds_up_no_other() -> None:
    """The link from rank 0 to rank 1 accepts nothing: rank 2 still gets its counts and waits for rank 1."""
    case = Case("stopped", 3, 6, hidden=64, topk=2, experts=6)
    trial = Trial.of(case)

    def on_each_rank(group: Any) -> str:
        buffer = make_buffer(group, case, "proxy", nic=failing(0, 1, 0, 0), timeout=2.0)
        with pytest.raises(deep_ep.DeepEPError) as info:
            buffer.dispatch(**dispatch_arguments(trial.work, buffer.rank))
        barrier(group)
        return str(info.value)

    for said in under_schedules(3, on_each_rank):
        waited = [re.search(r"(?:waited for|was waiting for:) (.*)", one) for one in said]
        assert waited[1] is not None and "counts (notify) of rank 0" in waited[1][1], list(said)
        assert waited[2] is not None and "of rank 1" in waited[2][1], list(said)


@pytest.mark.scenarios
def test_the_sender_alone() -> None:
    """The sender over a scripted network: splitting, numbering and bounds of messages, links that end in the middle of
    a put, peers that accept nothing.
    """
    for seed in range(1, 6):
        result = run(build_protocol(), "sender", str(seed))
        assert result.returncode == 0, f"seed {seed}\n{result.stderr}"


def test_the_ring_bounds_what_is_posted() -> None:
    """The ring has few commands: kernels wait for room, and nothing is lost."""
    case = Case("tight", 3, 40, hidden=64, topk=3, experts=6)
    trial = Trial.of(case)
    nic = deep_ep.NicOptions(blocks=8, max_bytes=1024, mtu=64, in_flight=2, max_delay=8)

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, case, "proxy", nic=nic)
        for _ in range(3):
            round_trip_without(buffer, buffer.rank, trial, trial)

    under_schedules(3, on_each_rank)


def test_both_modes_on_one_buffer_with_recoveries() -> None:
    """Sequence numbers and totals restart in each generation."""
    case = BY_NAME["2x2_uniform"]
    trial = Trial.of(case)

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, case, "proxy")
        for _ in range(3):
            round_trip_without(buffer, buffer.rank, trial, trial)
            barrier(group)
            buffer.abort()
            buffer.recover()
        round_trip_without(buffer, buffer.rank, trial, trial)

    under_schedules(4, on_each_rank)


def test_what_has_not_arrived_is_not_done() -> None:
    """The operation in which a link fails does not succeed on the sender, even if nothing else holds up that rank."""
    case = Case("lost", 2, 6, hidden=64, topk=1, experts=2)
    trial = Trial.of(case)

    def on_each_rank(group: Any) -> str:
        buffer = make_buffer(group, case, "proxy", nic=failing(0, 1, 1, ERROR), timeout=2.0)
        try:
            results = buffer.dispatch(**dispatch_arguments(trial.work, buffer.rank))
            trial.check_dispatch(buffer.rank, results)
            said = "" if buffer.rank == 1 else "rank 0 has dispatched"
        except deep_ep.DeepEPError as error:
            said = str(error)
        barrier(group)
        return said

    for said in under_schedules(2, on_each_rank):
        assert "the proxy cannot send to rank 1" in said[0], list(said)


def test_a_rank_that_is_done_may_go() -> None:
    """The rows of rank 2 never reach rank 0, which must blame rank 2: rank 1 has also ended the operation and left."""
    case = Case("gone", 3, 6, hidden=64, topk=3, experts=6)
    trial = Trial.of(case)

    def on_each_rank(group: Any) -> str:
        buffer = make_buffer(group, case, "proxy", nic=failing(2, 0, 3, 0), timeout=2.0)
        what = ""
        try:
            trial.check_dispatch(buffer.rank, buffer.dispatch(**dispatch_arguments(trial.work, buffer.rank)))
        except deep_ep.DeepEPError as error:
            what = str(error)
        buffer.destroy()
        barrier(group)
        return what

    # In some schedules the link fails before the counts have passed it, and no rank succeeds.
    ended_well = [said for said in under_schedules(3, on_each_rank) if said[1] == ""]
    assert ended_well
    for said in ended_well:
        assert "chunk arrived of rank 2" in said[0] and "rank 1" not in said[0], list(said)
