"""Two machines that share no memory: network namespaces of this one, joined by a cable."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from builds import LONG, in_long
from deep_ep_py.base.native import C
from machines import MACHINES, Machines, two_machines

pytestmark = [
    pytest.mark.once,
    pytest.mark.skipif(not C.proxy_providers(), reason="no libfabric (Debian: libfabric-dev, then `make clean build`)"),
]

IN_LONG = pytest.mark.skipif(not LONG, reason="waits for seconds: in `make test-long`")

PER_MACHINE = 2
RANKS = MACHINES * PER_MACHINE
WORKER = "machine_failures.py"


@pytest.fixture
def machines(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machines]:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "cable")  # host names of a namespace do not resolve to its address
    with two_machines() as made:
        yield made


@pytest.mark.thorough
@pytest.mark.parametrize("ranks_per_node", [4, in_long(2)])
def test_the_clusters_tests_pass(
    ranks_per_node: int, machines: Machines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In both modes, in one and two hops, with failures and recoveries, by `torchrun` on each machine. If a machine
    has two nodes, software NICs join its nodes while the proxy joins the machines.
    """
    monkeypatch.setenv("DEEP_EP_RANKS_PER_NODE", str(ranks_per_node))
    arguments = ("-m", "pytest", "-q", "-rsfE", "-p", "no:cacheprovider", "tests/transport/multinode")
    launchers = machines.torchrun(4, tmp_path, *arguments)
    output = "\n".join(f"--- machine {machine}:\n{done.stdout}" for machine, done in enumerate(launchers))
    assert [done.returncode for done in launchers] == [0] * MACHINES, output
    ranks = [log.read_text() for log in tmp_path.glob("*/*/attempt_0/*/stdout.log")]
    passed = [re.findall(r"^(\d+) passed in ", rank, re.MULTILINE) for rank in ranks]
    assert len(passed) == MACHINES * 4 and all(passed) and all(one == passed[0] for one in passed), output


@pytest.mark.timed
@pytest.mark.parametrize("victim", [0, pytest.param(RANKS - 1, marks=[pytest.mark.long, IN_LONG])])
def test_a_process_that_is_killed_is_named_everywhere(machines: Machines, victim: int) -> None:
    with machines.ranks(PER_MACHINE, WORKER) as ranks:
        pids = [ranks.next(rank)["made"] for rank in range(RANKS)]
        time.sleep(0.5)
        ranks.signal(victim, signal.SIGKILL)
        killed = time.monotonic()
        for rank in set(range(RANKS)) - {victim}:
            said = ranks.next(rank)
            near = rank // PER_MACHINE == victim // PER_MACHINE
            where = "" if near else f" on {machines.address(victim // PER_MACHINE)}"
            assert f"rank {victim}'s process (pid {pids[victim]}{where}) has died" in said["raised"], said
            assert said["at"] - killed < 2.0, said


@pytest.mark.timed
@pytest.mark.thorough
def test_a_machine_that_is_cut_off_is_named(machines: Machines) -> None:
    """Each machine considers the other silent and its own ranks alive."""
    with machines.ranks(PER_MACHINE, WORKER) as ranks:
        for rank in range(RANKS):
            ranks.next(rank)
        time.sleep(0.5)
        machines.cut(1)
        cut = time.monotonic()
        for rank in range(RANKS):
            said = ranks.next(rank)
            far = machines.address(1 - rank // PER_MACHINE)
            assert re.search(
                rf"nothing has come for 5 s from the machine of rank \d \(pid \d+ on {re.escape(far)}\)", said["raised"]
            ), said
            assert 4.0 < said["at"] - cut < 10.0, said


@pytest.mark.long
@IN_LONG
@pytest.mark.timed
def test_a_machine_whose_only_rank_is_stopped_is_silent(machines: Machines) -> None:
    """There is no other rank on that machine to report that it is alive."""
    with machines.ranks(1, WORKER) as ranks:
        for rank in range(MACHINES):
            ranks.next(rank)
        time.sleep(0.5)
        ranks.signal(1, signal.SIGSTOP)
        stopped = time.monotonic()
        said = ranks.next(0)
        assert "nothing has come for 5 s from the machine of rank 1" in said["raised"], said
        assert 4.0 < said["at"] - stopped < 10.0, said
        ranks.signal(1, signal.SIGCONT)
        said = ranks.next(1)
        where = re.escape(machines.address(0))
        assert re.search(
            rf"rank 0 \(pid \d+ on {where}\) continues without rank 1, from whose machine", said["raised"]
        ), said


@pytest.mark.long
@IN_LONG
@pytest.mark.timed
def test_a_job_that_is_stopped_goes_on(machines: Machines) -> None:
    """Its ranks resume one after another, long after the time at which each would have considered the others silent."""
    with machines.ranks(1, WORKER, "--rounds=3000") as ranks:
        for rank in range(MACHINES):
            ranks.next(rank)
        time.sleep(0.5)
        for rank in range(MACHINES):
            ranks.signal(rank, signal.SIGSTOP)
        time.sleep(6.5)
        for rank in range(MACHINES):
            ranks.signal(rank, signal.SIGCONT)
            time.sleep(0.5)
        told = [ranks.next(rank) for rank in range(MACHINES)]
        assert all(said.get("ended") for said in told), told


@pytest.mark.long
@IN_LONG
@pytest.mark.timed
def test_a_process_that_is_stopped_is_named_when_the_time_is_over(machines: Machines) -> None:
    """Its machine is not silent, so nothing is concluded earlier. The process fails too when it resumes."""
    victim = RANKS - 1
    with machines.ranks(PER_MACHINE, WORKER, "--timeout=8") as ranks:
        for rank in range(RANKS):
            ranks.next(rank)
        time.sleep(0.5)
        ranks.signal(victim, signal.SIGSTOP)
        stopped = time.monotonic()
        told = [ranks.next(rank) for rank in range(victim)]
        ranks.signal(victim, signal.SIGCONT)
        assert all(7.0 < said["at"] - stopped < 12.0 for said in told), told
        assert any(said["kind"] == "DeepEPTimeout" and f"rank {victim}" in said["raised"] for said in told), told
        assert ranks.next(victim)["kind"] in ("DeepEPError", "DeepEPTimeout")


@pytest.mark.timed
@pytest.mark.thorough
def test_a_rank_that_ends_well_ends_no_other(machines: Machines) -> None:
    with machines.ranks(PER_MACHINE, WORKER, "--rounds=20") as ranks:
        for rank in range(RANKS):
            ranks.next(rank)
        told = [ranks.next(rank) for rank in range(RANKS)]
        assert all(said.get("ended") for said in told), told


@pytest.mark.long
@IN_LONG
@pytest.mark.timed
def test_the_end_of_a_buffer_waits_for_no_machine_that_is_cut_off(machines: Machines) -> None:
    """What remains to be sent to it would only have been sent after the last call."""
    with machines.ranks(1, WORKER, "--rounds=20", "--rests=8", "--timeout=30") as ranks:
        for rank in range(MACHINES):
            ranks.next(rank)
        time.sleep(1.0)
        machines.cut(1)
        told = [ranks.next(rank) for rank in range(MACHINES)]
        assert all(said["took"] < 5.0 for said in told), told
