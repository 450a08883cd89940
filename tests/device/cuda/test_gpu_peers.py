"""GPUs of a machine that cannot use each other's memory as kernels need: another path joins them."""

from __future__ import annotations

import importlib.util
import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import deep_ep_py as deep_ep
import low_latency
from builds import in_long
from cases import Case
from deep_ep_py.base.gpus import DRIVER, NVML, GpuAnswer
from deep_ep_py.base.native import C
from deep_ep_py.device.cpu import CpuDevice
from deep_ep_py.testing import run_ranks
from deep_ep_py.transport.bootstrap.groups import make_bootstrap
from deep_ep_py.transport.topology.agreement import agree
from deep_ep_py.transport.topology.gpus import Apart
from deep_ep_py.transport.topology.topology import Topology
from harness import Trial, round_trip
from launches import forked
from nvshmem_runs import Nvshmem

pytestmark = pytest.mark.once

needs_nvshmem = pytest.mark.skipif(
    importlib.util.find_spec("nvshmem") is None, reason="no nvshmem4py (`make venv` installs it)"
)
needs_libfabric = pytest.mark.skipif(not C.proxy_providers(), reason="no libfabric")


class Gpus(SimpleNamespace):
    """A device, as far as it is queried: its name, and what it answers about others."""

    def answer_about(self, gpu: str) -> GpuAnswer:
        return self.answers.get(gpu, GpuAnswer(DRIVER))


def asked(*answers: dict[str, GpuAnswer]) -> Apart:
    """Return what all ranks learn from the answers of each GPU about others, which are named a, b, ..."""
    found: list[Any] = [None] * len(answers)

    def on_each_rank(group: Any) -> None:
        rank = group.rank()
        found[rank] = Apart.ask(make_bootstrap(group), Gpus(gpu="abcd"[rank], answers=answers[rank]))  # type: ignore[arg-type]

    run_ranks(len(answers), on_each_rank)
    assert all(one == found[0] for one in found)
    return found[0]


def test_a_refusal_at_either_end_counts_for_both() -> None:
    def no(why: str) -> GpuAnswer:
        return GpuAnswer(NVML, why)

    assert asked({}, {}, {}) == Apart({}, {(0, 1): DRIVER, (0, 2): DRIVER, (1, 2): DRIVER})
    assert asked({"c": no("far")}, {}, {}).reasons == {(0, 2): "far"}
    found = asked({"b": no("one")}, {"a": no("other")}, {"a": no("third")})
    assert found == Apart({(0, 1): "one", (0, 2): "third"}, {(1, 2): DRIVER})


def test_one_end_that_knows_is_enough() -> None:
    unknown = GpuAnswer("", "hidden", access=False)
    assert asked({"b": unknown}, {"a": GpuAnswer(NVML)}) == Apart({}, {(0, 1): NVML})
    assert asked({"b": unknown}, {"a": GpuAnswer(NVML, "far")}).reasons == {(0, 1): "far"}
    found = asked({"b": unknown}, {"a": unknown})
    assert found.reasons == {(0, 1): "hidden"} and found.without_access == {(0, 1)}


def test_ranks_on_one_gpu_are_counted() -> None:
    assert asked({}, {}, {}).sharers == (1, 1, 1)
    found: list[Any] = [None] * 4

    def on_each_rank(group: Any) -> None:
        rank = group.rank()
        found[rank] = Apart.ask(make_bootstrap(group), Gpus(gpu=("a", "b", "a", "")[rank], answers={})).sharers  # type: ignore[arg-type]

    run_ranks(4, on_each_rank)
    assert found == [(2, 1, 2, 1)] * 4


NONE, ACROSS = Apart(), Apart({(0, 2): "over PCIe"})
INSIDE = Apart({(2, 3): "over PCIe"}, sharers=(1,) * 4)


def settled(apart: Apart, fabric: list[str], ranks_per_node: int, **options: Any) -> list[Any]:
    """Return the topology of each of 4 ranks that agree on paths, or what it raises."""
    found: list[Any] = [None] * 4

    def on_each_rank(group: Any) -> None:
        rank, bootstrap = group.rank(), make_bootstrap(group)
        given = {"apart": apart, **options}
        try:
            made = partial(Topology.of, rank, 4, CpuDevice(), fabric, ranks_per_node, None, **given)
            found[rank] = agree(bootstrap, made)
        except ValueError as error:
            found[rank] = str(error)

    run_ranks(4, on_each_rank)
    return found


def test_ranks_whose_gpus_are_apart_take_another_path() -> None:
    """Without such a path, the table of paths says why."""
    assert [topology.routes for topology in settled(ACROSS, ["peer", "ibgda"], 4)] == [
        ("peer", "peer", "ibgda", "peer"),
        ("peer",) * 4,
        ("ibgda", "peer", "peer", "peer"),
        ("peer",) * 4,
    ]
    for said in settled(ACROSS, ["peer"], 4):
        assert "rank 0 does not reach rank 2 (peer: over PCIe)" in said, said


def test_no_rank_passes_rows_on_inside_a_node_that_is_apart() -> None:
    """It would have to store them into the heaps of its node."""
    both = ["peer", "ibgda"]
    for ranks, hops, once in ((NONE, 2, None), (ACROSS, 2, None), (INSIDE, 1, False)):
        for topology in settled(ranks, both, 2, low_latency=True):
            assert (topology.hops, topology.once_per_node) == (hops, once)
    for said in settled(INSIDE, both, 2, hops=2):
        assert said == "hops=2: expected ranks of a node to use each other's memory; ranks 2 and 3: over PCIe"
    for said in settled(INSIDE, both, 2, hops=1, low_latency=True, once_per_node=True):
        assert said.startswith("once_per_node=True: expected ranks of a node to use each other's memory"), said
    # A single node passes nothing on.
    assert {topology.hops for topology in settled(INSIDE, both, 4)} == {1}


@pytest.mark.parametrize("ranks_per_node", [2, 4])
def test_rows_between_them(monkeypatch: pytest.MonkeyPatch, ranks_per_node: int) -> None:
    monkeypatch.setattr(Apart, "ask", lambda *_: INSIDE)
    case = Case("apart", 4, 20, hidden=264, topk=4, experts=16, ranks_per_node=ranks_per_node, hops=1)
    sizes = low_latency.Sizes("apart", 4, (20,) * 4, 20, 256, 4, 16)
    given = {"ranks_per_node": ranks_per_node, "fabric": ["peer", "ibgda"], "timeout": 60.0, "low_latency_mode": True}

    def on_each_rank(group: Any) -> None:
        rank = group.rank()
        with deep_ep.Buffer(group, 1 << 20, 4 << 20, **given) as buffer:
            assert buffer.paths[rank ^ 1] == ("peer" if rank < 2 else "ibgda")
            round_trip(buffer, rank, Trial.of(case), 2)
            for cast in low_latency.CASTS.values():
                low_latency.round_trip(buffer, low_latency.Work.of(sizes), cast, hooks=False)

    run_ranks(4, on_each_rank)


@needs_libfabric
def test_gpus_that_processes_hide_from_each_other(double: Path, workers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with CUDA_VISIBLE_DEVICES or a cgroup for each rank, on all kinds of machines."""
    monkeypatch.setenv("LD_LIBRARY_PATH", os.pathsep.join([str(double), os.environ.get("LD_LIBRARY_PATH", "")]))
    done = forked(workers / "hidden_gpus.py", 2)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_nvshmem
@pytest.mark.parametrize(
    ("heap", "reason", "machines"),
    [
        pytest.param("own", "DOUBLE_PCIE", "1", marks=needs_libfabric),
        in_long("own", "DOUBLE_APART", "1"),
        in_long("own", "DOUBLE_PCIE", "2"),
        in_long("nvshmem", "DOUBLE_PCIE", "1"),
        ("nvshmem", "DOUBLE_PCIE", "2"),
    ],
)
def test_both_modes(nvshmem: Nvshmem, heap: str, reason: str, machines: str) -> None:
    near = {"NVSHMEM_DOUBLE_PES_PER_NODE": str(4 // int(machines))}
    done = nvshmem.run("gpus_over_pcie.py", 4, heap, version="3.8.0", MACHINES=machines, **{reason: "1"}, **near)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_nvshmem
@pytest.mark.thorough
def test_why_is_told(nvshmem: Nvshmem) -> None:
    done = nvshmem.run("gpus_over_pcie.py", 2, "own", DOUBLE_PCIE="1", DEEP_EP_FABRIC="peer")
    assert done.returncode != 0
    assert "rank 0 does not reach rank 1 (peer: atomics between their GPUs are not native" in done.stderr, done.stderr
