"""The proxy between processes, over libfabric: TCP on this machine in place of a NIC that no GPU can drive."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from builds import LONG
from deep_ep_py.base.environment import PROVIDER
from deep_ep_py.base.native import C
from forks import run_python
from launches import forked, of_ranks, shared_memory
from worker_runs import lines_of

OFFERED = C.proxy_providers()
# `shm` does not report that a process has died.
TCP = [provider for provider in ("net", "tcp;ofi_rxm") if provider in OFFERED]

pytestmark = [
    pytest.mark.once,
    pytest.mark.skipif(not OFFERED, reason="no libfabric (Debian: libfabric-dev, then `make clean build`)"),
]


@pytest.mark.parametrize(
    ("provider", "ranks"),
    [
        (provider, ranks)
        for provider, most in (("net", 4), ("tcp;ofi_rxm", 2), ("shm", 2))
        for ranks in ((2, 4, 8) if LONG else (most,))
        if provider in OFFERED
    ],
)
def test_round_trip(workers: Path, provider: str, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Directly to each rank and in two hops; outputs outlive their Buffer."""
    monkeypatch.setenv(PROVIDER, provider)
    before = shared_memory()
    done = forked(workers / "round_trip.py", ranks, "--path=proxy", "--path=proxy_in_two_hops")
    assert done.returncode == 0, done.stdout + done.stderr
    assert shared_memory() <= before, "processes have left shared memory behind"


@pytest.mark.parametrize("provider", TCP[:1])
def test_low_latency_layers(workers: Path, provider: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PROVIDER, provider)
    done = forked(workers / "low_latency_layers.py", 4, "--fabric=proxy")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.timed
@pytest.mark.parametrize(
    ("provider", "fabric"), [*((provider, "proxy") for provider in TCP), *((one, "machines") for one in TCP[:1])]
)
@pytest.mark.thorough
def test_a_process_that_is_killed(provider: str, fabric: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All other ranks name its rank, although the link shows the failure first, and continue without it, even if each
    assumes the others on other machines and only learns of them over TCP.
    """
    monkeypatch.setenv(PROVIDER, provider)
    monkeypatch.setenv("KILLED_RANKS_FABRICS", fabric)
    trials = lines_of("killed_ranks.py", "--trials=4", seconds=120)
    survivors: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (one, trial) for trial in trials for one in trial["survivors"].values()
    ]
    assert len(trials) == 4 and any(trial["made"] == trial["ranks"] for trial in trials)
    for one, trial in survivors:
        told = json.dumps(trial)  # a string, which pytest does not shorten
        assert not trial["hung"] and not trial["left_behind"] and one["status"] == 0, told
        assert one["seconds"] < 2.0 and one["kept"] == {}, told
        if trial["made"] == trial["ranks"]:
            assert one["named"] and one["masked"] == [trial["victim"]], told


@pytest.mark.timed
@pytest.mark.thorough
def test_idle_buffers_sleep(workers: Path) -> None:
    """An idle Buffer wakes fewer than 300 times a second, which a thread that polls every millisecond exceeds on any
    machine, and does not spin: it used 1 % of a core where cores were slow. It still works afterwards.
    """
    providers = [provider for provider in ("net", "tcp;ofi_rxm", "shm") if provider in OFFERED]
    done = forked(workers / "idle_buffers.py", 2, *providers)
    assert done.returncode == 0, done.stdout + done.stderr
    reports = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [report["provider"] for report in reports] == providers, done.stdout
    for report in reports:
        assert max(report["shares"]) < 0.05 and max(report["wakes"]) < 300, reports
        assert max(report["after"]) < 1.0, reports


def test_signals_stay_the_callers() -> None:
    """A library that libfabric loads would install handlers for SIGTERM and other signals."""
    program = (
        "import re; from deep_ep_py.base.native import C\n"
        "caught = lambda: re.search('SigCgt:.*', open('/proc/self/status').read()).group()\n"
        "before = caught(); assert C.proxy_providers(); assert caught() == before, (before, caught())"
    )
    environment = {name: value for name, value in of_ranks().items() if "BACKTRACE" not in name}
    done = run_python(["-c", program], environment)
    assert done.returncode == 0, done.stderr


def test_a_provider_that_is_not_there(workers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PROVIDER, "carrier pigeons")
    done = forked(workers / "round_trip.py", 2, "--path=proxy")
    assert done.returncode != 0
    assert (
        "DEEP_EP_PROXY_PROVIDER='carrier pigeons': expected one of efa, verbs;ofi_rxm, net, tcp"
        in done.stdout + done.stderr
    )


def test_one_rank_that_cannot_go_along(workers: Path) -> None:
    """All ranks learn of it before any of them has created a network."""
    done = forked(workers / "refused_paths.py", 3)
    assert done.returncode == 0, done.stdout + done.stderr


def test_enable_shrink_is_refused(workers: Path) -> None:
    """A rank that was left out could still write into the memory of the others: no provider reports when it no longer
    can."""
    done = forked(workers / "shrinking_proxy.py", 2)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("enable_shrink=True: expected a fabric other than 'proxy'") == 2, done.stdout
