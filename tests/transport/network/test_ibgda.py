"""Work requests and the software NIC that executes them, without a Buffer."""

from __future__ import annotations

import pytest

from builds import BUILD
from native_programs import build_protocol, run

SEEDS = range({"fast": 8, "exact": 8, "tsan": 4, "asan": 3}[BUILD])  # 0 is first come, first served


@pytest.mark.scenarios
def test_the_nic_names_what_it_refuses() -> None:
    """Each invalid field of a request, the doorbell and its record, one at a time, and the effect of valid ones."""
    result = run(build_protocol(), "fields", "0")
    assert result.returncode == 0, result.stderr


@pytest.mark.scenarios
def test_posters_share_a_small_ring() -> None:
    """Back-pressure, in-order publication and doorbells left to other posters, with a NIC that is slow and reorders."""
    for seed in SEEDS:
        result = run(build_protocol(), "posters", str(seed))
        assert result.returncode == 0, f"seed {seed}\n{result.stderr}"


@pytest.mark.parametrize("scenario", ["sharing", "sharing, giving up", "sharing, doorbells"])
@pytest.mark.scenarios
def test_another_library_posts_between(scenario: str) -> None:
    """Threads of the other library reserve WQEBBs before there is room, and wait without ringing. Whatever our threads
    give up, the others can post and wait for everything posted, and all reserved WQEBBs are executed."""
    for seed in SEEDS:
        result = run(build_protocol(), scenario, str(seed))
        assert result.returncode == 0, f"seed {seed}\n{result.stderr}"


@pytest.mark.scenarios
def test_the_threads_of_a_block_share_the_wait_for_its_queue_pairs() -> None:
    """The end of an operation costs the latency of a few queue pairs, not of all. A thread whose wait has given up
    reports it, and the others finish theirs."""
    for seed in SEEDS:
        result = run(build_protocol(), "quiet", str(seed))
        assert result.returncode == 0, f"seed {seed}\n{result.stderr}"


@pytest.mark.parametrize("scenario", ["peer", "peer rounds", "one region", "weak", "ibgda"])
@pytest.mark.scenarios
def test_normal_mode(scenario: str) -> None:
    """The scenario that `make mutants` breaks, without a bug."""
    for seed in SEEDS:
        result = run(build_protocol(), scenario, str(seed))
        assert result.returncode == 0, f"seed {seed}\n{result.stderr}"


@pytest.mark.once
@pytest.mark.scenarios
def test_the_index_wraps() -> None:
    result = run(build_protocol(), "wrap", "1", timeout=200)
    assert result.returncode == 0, result.stderr
    puts, requests, doorbells = (int(part.split()[0]) for part in result.stdout.split(","))
    assert requests == 3 * puts > 1 << 16
    assert doorbells < puts, "some posters must have left the doorbell to others"
