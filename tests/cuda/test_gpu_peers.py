"""GPUs of a machine that do not use each other's memory as kernels need it: another path joins them."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest

from builds import in_long
from deep_ep_py.bootstrap.groups import make_bootstrap
from deep_ep_py.core.native import C
from deep_ep_py.device.cpu import CpuDevice
from deep_ep_py.testing import run_ranks
from deep_ep_py.topology.agreement import agree
from deep_ep_py.topology.gpus import ask_gpus
from deep_ep_py.topology.topology import Topology
from nvshmem_runs import Nvshmem

pytestmark = pytest.mark.once

needs_nvshmem = pytest.mark.skipif(
    importlib.util.find_spec("nvshmem") is None, reason="no nvshmem4py (`make venv` installs it)"
)
needs_libfabric = pytest.mark.skipif(not C.proxy_providers(), reason="no libfabric")


class Gpus(SimpleNamespace):
    """What is asked of a device: its name, and of which others it says what."""

    def refusal_of_gpu(self, gpu: str) -> str:
        return self.refused.get(gpu, "")


def apart(*refused: dict[str, str]) -> list[dict[int, str]]:
    """What each rank learns, by what each one's GPU says of others: they are named a, b, ..."""
    found: list[Any] = [None] * len(refused)

    def on_each_rank(group: Any) -> None:
        rank = group.rank()
        found[rank] = ask_gpus(make_bootstrap(group), Gpus(gpu="abcd"[rank], refused=refused[rank]))  # type: ignore[arg-type]

    run_ranks(len(refused), on_each_rank)
    return found


def test_what_either_end_says_counts_for_both() -> None:
    """A process may not see the GPUs of the others."""
    assert apart({}, {}, {}) == [{}, {}, {}]
    assert apart({"c": "far"}, {}, {}) == [{2: "far"}, {}, {0: "far"}]
    assert apart({"b": "one"}, {"a": "other"}, {"a": "third"}) == [{1: "one", 2: "third"}, {0: "other"}, {0: "third"}]


def test_ranks_whose_gpus_are_apart_take_another_path() -> None:
    """And without one the table of paths says why."""
    refused = [{}, {}, {"a": "over PCIe"}, {}]
    found: list[Any] = [None] * 4

    def on_each_rank(group: Any) -> None:
        rank, bootstrap = group.rank(), make_bootstrap(group)
        gpus = ask_gpus(bootstrap, Gpus(gpu="abcd"[rank], refused=refused[rank]))  # type: ignore[arg-type]

        def settle(fabric: list[str]) -> Topology:
            return agree(bootstrap, lambda: Topology.of(rank, 4, CpuDevice(), fabric, 4, None, apart=gpus))

        routes = settle(["peer", "ibgda"]).routes
        with pytest.raises(ValueError) as info:
            settle(["peer"])
        found[rank] = routes, str(info.value)

    run_ranks(4, on_each_rank)
    assert [routes for routes, _ in found] == [
        ("peer", "peer", "ibgda", "peer"),
        ("peer",) * 4,
        ("ibgda", "peer", "peer", "peer"),
        ("peer",) * 4,
    ]
    assert all("rank 0 does not reach rank 2 (peer: over PCIe)" in said for _, said in found), found[1]


@needs_nvshmem
@pytest.mark.parametrize(
    ("heap", "reason"),
    [
        pytest.param("own", "DOUBLE_PCIE", marks=needs_libfabric),
        in_long("own", "DOUBLE_APART"),
        ("nvshmem", "DOUBLE_PCIE"),
    ],
)
def test_both_modes(nvshmem: Nvshmem, heap: str, reason: str) -> None:
    done = nvshmem.run("gpus_over_pcie.py", 4, heap, version="3.8.0", **{reason: "1"})
    assert done.returncode == 0, done.stdout + done.stderr


@needs_nvshmem
def test_why_is_told(nvshmem: Nvshmem) -> None:
    done = nvshmem.run("gpus_over_pcie.py", 2, "own", DOUBLE_PCIE="1", DEEP_EP_FABRIC="peer")
    assert done.returncode != 0
    assert "rank 0 does not reach rank 1 (peer: atomics between their GPUs are not native" in done.stderr, done.stderr
