"""`doctor` under torchrun: the machines of a job and the paths between its ranks."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from deep_ep_py.base.gpus import DRIVER, NVML
from deep_ep_py.tools.doctor.job import about_gpus
from deep_ep_py.tools.doctor.measured import Pair, summarize
from deep_ep_py.transport.topology.gpus import Apart
from forks import run_python
from launches import of_ranks
from places import SUPPORT

pytestmark = pytest.mark.once


def doctor(ranks: int, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [str(SUPPORT / "fork_torchrun.py"), str(ranks), "-m", "deep_ep_py", "doctor", *arguments]
    return run_python(command, of_ranks() | variables)


def test_two_nodes_of_software_nics(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    done = doctor(4, "--measure", "--json", str(file), DEEP_EP_RANKS_PER_NODE="2")
    assert done.returncode == 0, done.stdout + done.stderr
    for line in ("   0123", "0  .PII", "1  P.II", "2  II.P", "3  IIP."):
        assert f"\n  {line}\n" in done.stdout
    assert done.stdout.count("Host\n") == 1, "more than one report of a single machine"
    report: dict[str, Any] = json.loads(file.read_text())
    assert [one["ranks"] for one in report["machines"]] == [[0, 1, 2, 3]]
    assert report["routes"][0] == ["peer", "peer", "ibgda", "ibgda"] and not report["failure"]
    pairs = {(pair["source"], pair["destination"]): pair for pair in report["pairs"]}
    assert pairs.keys() == {(one, other) for one in range(4) for other in range(4) if one != other}
    assert all(pair["gb_per_s"] > 0 and pair["us"] > 0 for pair in pairs.values())
    assert pairs[0, 2]["path"] == "ibgda" and pairs[0, 1]["path"] == "peer"


def test_a_job_that_cannot_make_a_buffer(tmp_path: Path) -> None:
    done = doctor(2, DEEP_EP_FABRIC="copper")
    assert done.returncode != 0
    assert "No Buffer could be made" in done.stdout and "DEEP_EP_FABRIC='copper'" in done.stdout


def test_a_variable_that_is_wrong_is_named_beside_the_failure() -> None:
    """Rank 0 prints it as JSON and nothing else on standard output; the other ranks print nothing."""
    done = doctor(2, "--json", DEEP_EP_RANKS_PER_NODE="0")
    assert done.returncode != 0
    report = json.loads(done.stdout)
    assert "DEEP_EP_RANKS_PER_NODE" in report["failure"] and report["routes"] == [] and report["pairs"] == []
    found = {one["name"]: one for section in report["machines"][0]["sections"] for one in section["findings"]}
    assert found["DEEP_EP_RANKS_PER_NODE"]["verdict"] == "error"


def test_measuring_needs_several_ranks() -> None:
    done = doctor(1, "--measure")
    assert done.returncode != 0 and "expected several ranks" in done.stderr


def test_who_says_that_gpus_reach_each_other() -> None:
    assert about_gpus(Apart()) == []
    reasons = {(0, rank): f"reason {rank}" for rank in range(2, 12)}
    lines = about_gpus(Apart(reasons, {(0, 1): NVML, (1, 2): DRIVER, (1, 3): NVML}))
    assert lines[:3] == [
        "2 pairs of ranks on a machine can use each other's GPU memory, according to NVML",
        "1 pair of ranks on a machine can use each other's GPU memory, according to the CUDA driver",
        "ranks 0 and 2 cannot: reason 2",
    ]
    assert len(lines) == 11 and lines[-1] == "nor can 2 more pairs"


def test_the_slowest_pair_is_named() -> None:
    pairs = [Pair(0, 1, "peer", 10.0, 3.0), Pair(1, 0, "peer", 4.0, 9.0), Pair(2, 0, "proxy", 1.0, 50.0)]
    peer, proxy = summarize(pairs)
    assert (peer.gb_per_s, peer.us, peer.slowest, peer.latest) == (7.0, 6.0, pairs[1], pairs[1])
    assert proxy.path == "proxy"
