"""The requirements for GPUs to post to NICs that `doctor` reports as missing, on fictitious machines."""

from __future__ import annotations

from pathlib import Path

import pytest

from deep_ep_py.base.machine_files import Files
from deep_ep_py.tools.doctor.driver import NO_ORDERING, OWNER_ORDERING, DriverFacts, DriverGpu, DriverUnavailableError
from deep_ep_py.tools.doctor.findings import Finding, Section, Verdict
from deep_ep_py.tools.doctor.posting import posting
from deep_ep_py.transport.nvshmem.settings import ENABLE_IBGDA, INSTALL
from machine_trees import Tree, by_name, efa, two_gpus_and_nics

pytestmark = pytest.mark.once

ENABLED = {ENABLE_IBGDA: "1"}


def facts(*orderings: int) -> DriverFacts:
    gpus = tuple(DriverGpu("H100", f"0000:0{n}:00.0", True, one, True, False) for n, one in enumerate(orderings))
    return DriverFacts("13.0", gpus, frozenset(), frozenset())


def found_in(
    root: Path,
    environment: dict[str, str] = ENABLED,
    has_nvshmem4py: bool = True,
    orderings: tuple[int, ...] | None = (OWNER_ORDERING, OWNER_ORDERING),
) -> dict[str, Finding]:
    def read() -> DriverFacts:
        if orderings is None:
            raise DriverUnavailableError("not there")
        return facts(*orderings)

    return by_name(Section.of("Paths", posting(Files(root), environment, has_nvshmem4py, read)))


def test_a_machine_that_has_all(tmp_path: Path) -> None:
    two_gpus_and_nics(tmp_path)
    for orderings in ((OWNER_ORDERING, OWNER_ORDERING), None):  # a driver that does not answer is no obstacle
        found = found_in(tmp_path, orderings=orderings)
        assert found.keys() == {"ibgda"}
        assert found["ibgda"].verdict is Verdict.GOOD and found["ibgda"].value.startswith("mlx5_0, mlx5_1, ")


def test_a_machine_without_gpus(tmp_path: Path) -> None:
    Tree(tmp_path).host()
    found = found_in(tmp_path, {}, has_nvshmem4py=False)
    assert found.keys() == {"ibgda"} and found["ibgda"].verdict is Verdict.INFO


def test_each_thing_that_is_missing_has_a_line(tmp_path: Path) -> None:
    tree, _ = two_gpus_and_nics(tmp_path)
    tree.driver(opened=False, words="")
    (tmp_path / "sys/module/nvidia_peermem/version").unlink()
    (tmp_path / "sys/module/nvidia_peermem").rmdir()
    found = found_in(tmp_path, has_nvshmem4py=False, orderings=(OWNER_ORDERING, NO_ORDERING))
    assert found["ibgda"].value == "4 prerequisites missing"
    assert {name: one.command for name, one in found.items() if name != "ibgda"} == {
        "ibgda needs nvshmem4py": INSTALL,
        "ibgda needs doorbells": found["ibgda needs doorbells"].command,
        "ibgda needs GPU memory": "sudo modprobe nvidia_peermem",
        "ibgda needs ordered writes": f"unset {ENABLE_IBGDA}",
    }
    assert "PeerMappingOverride=1" in found["ibgda needs doorbells"].command
    assert found["ibgda needs ordered writes"].value == "not ordered on cuda:1"
    assert {one.verdict for one in found.values()} == {Verdict.WARNING}


def test_nothing_is_wrong_where_it_is_not_asked_for(tmp_path: Path) -> None:
    efa(tmp_path)
    found = found_in(tmp_path, {}, has_nvshmem4py=False)
    assert {one.verdict for one in found.values()} == {Verdict.INFO}
    assert found["ibgda needs a ConnectX"].command == "lspci -d 15b3: -k"


def test_a_connectx_without_a_link_is_none(tmp_path: Path) -> None:
    _, ports = two_gpus_and_nics(tmp_path)
    for port in ports:
        Tree(tmp_path).states(port, "1: DOWN", "2: Polling")
    assert "ibgda needs a ConnectX" in found_in(tmp_path)


@pytest.mark.parametrize(
    ("environment", "name", "verdict"),
    [({}, "ibgda by default", Verdict.GOOD), ({ENABLE_IBGDA: "0"}, "ibgda needs IBGDA", Verdict.INFO)],
)
def test_the_variable(tmp_path: Path, environment: dict[str, str], name: str, verdict: Verdict) -> None:
    """Left unset, it only affects the default; 0 forbids posting."""
    two_gpus_and_nics(tmp_path)
    found = found_in(tmp_path, environment)
    assert found.keys() == {"ibgda", name}
    assert found["ibgda"].verdict is verdict and found[name].command == f"export {ENABLE_IBGDA}=1"
