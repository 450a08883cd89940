"""The findings of `doctor` on NVSHMEM's settings, on fictitious machines."""

from __future__ import annotations

from pathlib import Path

import pytest

from deep_ep_py.base.machine_files import Files
from deep_ep_py.tools.doctor.findings import Finding, Verdict
from deep_ep_py.tools.doctor.network import network
from deep_ep_py.tools.doctor.nics import read_nics
from deep_ep_py.tools.doctor.nvshmem import (
    HCA_LIST,
    HCA_PE_MAPPING,
    HCA_PREFIX,
    NICS_IN_TURN,
    SERVICE_LEVEL,
    TRAFFIC_CLASS,
    Process,
    settings,
)
from deep_ep_py.transport.nvshmem.settings import RELAXED_ORDERING
from machine_trees import NETWORK, Tree, by_name, efa, roce, two_gpus_and_nics

pytestmark = pytest.mark.once

INSTALLED = "nvidia-nvshmem-cu13 3.4.5"
CLASS, LEVEL = "traffic class", "service level"


def judged(root: Path, environment: dict[str, str], nvshmem: str | None = INSTALLED) -> dict[str, Finding]:
    return {finding.name: finding for finding in settings(read_nics(Files(root)), Process(environment, nvshmem))}


def mixed(root: Path) -> Tree:
    """Make a machine with mlx5_0 and mlx5_1 on InfiniBand and mlx5_2 on RoCE."""
    tree, _ = two_gpus_and_nics(root)
    tree.nic("mlx5_2", tree.device("pci0000:f0", "0000:f1:00.0", "0x15b3", NETWORK), "Ethernet")
    return tree


@pytest.mark.parametrize(
    ("make", "environment", "verdict", "command"),
    [
        (two_gpus_and_nics, {}, Verdict.GOOD, ""),
        (two_gpus_and_nics, {TRAFFIC_CLASS: "106"}, Verdict.ERROR, f"unset {TRAFFIC_CLASS}"),
        (two_gpus_and_nics, {TRAFFIC_CLASS: ""}, Verdict.GOOD, ""),
        (roce, {}, Verdict.WARNING, f"export {TRAFFIC_CLASS}=CLASS"),
        (roce, {TRAFFIC_CLASS: "106"}, Verdict.GOOD, ""),
        (roce, {TRAFFIC_CLASS: "many"}, Verdict.ERROR, f"export {TRAFFIC_CLASS}=CLASS"),
        (roce, {TRAFFIC_CLASS: "256"}, Verdict.ERROR, f"export {TRAFFIC_CLASS}=CLASS"),
        (mixed, {}, Verdict.WARNING, f"export {HCA_LIST}=mlx5_0:1,mlx5_1:1"),
        (mixed, {TRAFFIC_CLASS: "106"}, Verdict.ERROR, f"export {HCA_LIST}=mlx5_2:1"),
        (mixed, {HCA_LIST: "mlx5_0:1,mlx5_1"}, Verdict.GOOD, ""),
        (mixed, {HCA_LIST: "^mlx5_2"}, Verdict.GOOD, ""),
        (mixed, {HCA_LIST: "mlx5_2", TRAFFIC_CLASS: "106"}, Verdict.GOOD, ""),
        (mixed, {HCA_LIST: "mlx5_2"}, Verdict.WARNING, f"export {TRAFFIC_CLASS}=CLASS"),
    ],
)
def test_the_traffic_class(
    tmp_path: Path, make: object, environment: dict[str, str], verdict: Verdict, command: str
) -> None:
    assert callable(make)
    make(tmp_path)
    found = judged(tmp_path, environment)[CLASS]
    assert (found.verdict, found.command) == (verdict, command)


@pytest.mark.parametrize(
    ("given", "verdict"),
    [
        (None, Verdict.INFO),
        ("0", Verdict.GOOD),
        ("no", Verdict.GOOD),
        ("1", Verdict.ERROR),
        ("off", Verdict.ERROR),
        ("", Verdict.ERROR),
    ],
)
def test_the_order_of_atomics(tmp_path: Path, given: str | None, verdict: Verdict) -> None:
    """NVSHMEM reads only the first letter of a switch, and takes an empty one for on."""
    two_gpus_and_nics(tmp_path)
    found = judged(tmp_path, {} if given is None else {RELAXED_ORDERING: given})["order of atomics"]
    assert found.verdict is verdict
    assert found.command == ("" if verdict is Verdict.GOOD else f"export {RELAXED_ORDERING}=0")


def test_nics_in_turn(tmp_path: Path) -> None:
    two_gpus_and_nics(tmp_path)
    assert "NICs of PEs" not in judged(tmp_path, {NICS_IN_TURN: "0"})
    found = judged(tmp_path, {NICS_IN_TURN: "1"})["NICs of PEs"]
    assert (found.verdict, found.command) == (Verdict.WARNING, f"unset {NICS_IN_TURN}")


def test_following_the_advice_for_two_kinds_of_nics_ends_it(tmp_path: Path) -> None:
    mixed(tmp_path)
    for environment in ({}, {TRAFFIC_CLASS: "106"}):
        command = judged(tmp_path, environment)[CLASS].command
        exported = dict(word.split("=", 1) for word in command.removeprefix("export ").split())
        assert judged(tmp_path, {**environment, **exported})[CLASS].verdict is Verdict.GOOD


@pytest.mark.parametrize(
    ("systems", "given", "verdict", "command"),
    [
        (("106", "106"), None, Verdict.WARNING, f"export {TRAFFIC_CLASS}=106"),
        (("106", "0x6a"), "0x6A", Verdict.GOOD, ""),
        (("106", "106"), "96", Verdict.WARNING, f"export {TRAFFIC_CLASS}=106"),
        (("106", "96"), "96", Verdict.WARNING, f"export {TRAFFIC_CLASS}=CLASS"),
    ],
)
def test_the_class_of_the_system(
    tmp_path: Path, systems: tuple[str, str], given: str | None, verdict: Verdict, command: str
) -> None:
    tree, _ = roce(tmp_path)
    for number, system in enumerate(systems):
        tree.file(f"/sys/class/infiniband/mlx5_{number}/tc/1/traffic_class", f"Global tclass={system}\n")
    found = judged(tmp_path, {TRAFFIC_CLASS: given} if given else {})[CLASS]
    assert (found.verdict, found.command) == (verdict, command)


def test_only_nics_that_are_used_count(tmp_path: Path) -> None:
    """Neither NICs that the list excludes nor those without a link."""
    tree, ports = roce(tmp_path)
    for number, system in enumerate((96, 106)):
        tree.file(f"/sys/class/infiniband/mlx5_{number}/tc/1/traffic_class", f"Global tclass={system}\n")
    listed = judged(tmp_path, {TRAFFIC_CLASS: "106", HCA_LIST: "mlx5_1:1"})
    assert listed[CLASS].verdict is Verdict.GOOD
    tree.states(ports[0], "1: DOWN", "2: Polling")
    assert judged(tmp_path, {TRAFFIC_CLASS: "106"})[CLASS].verdict is Verdict.GOOD


@pytest.mark.parametrize("make", [two_gpus_and_nics, roce, mixed])
def test_nothing_is_wrong_where_nvshmem_is_not_installed(tmp_path: Path, make: object) -> None:
    assert callable(make)
    make(tmp_path)
    found = judged(tmp_path, {TRAFFIC_CLASS: "many", SERVICE_LEVEL: "99"}, nvshmem=None)
    assert [finding.verdict for finding in found.values()] == [Verdict.INFO]
    assert found["NVSHMEM's settings"].value == f"{SERVICE_LEVEL}=99, {TRAFFIC_CLASS}=many"


def test_nics_that_nvshmem_cannot_post_on_are_not_judged(tmp_path: Path) -> None:
    efa(tmp_path)
    assert judged(tmp_path, {TRAFFIC_CLASS: "many"}) == {}


def test_names_that_nvshmem_does_not_look_for(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.nic("ibp26s0", tree.device("pci0000:00", "0000:1a:00.0", "0x15b3", NETWORK), "InfiniBand")
    found = judged(tmp_path, {})["NVSHMEM's NICs"]
    assert found.verdict is Verdict.WARNING
    assert found.command == f"export {HCA_PREFIX}=ibp; unset {HCA_LIST} {HCA_PE_MAPPING}"
    assert judged(tmp_path, {HCA_PREFIX: "ibp"})[CLASS].verdict is Verdict.GOOD


def test_the_prefix_of_several_nics(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    for number in ("25", "41"):
        device = tree.device(f"pci0000:{number}", f"0000:{number}:00.0", "0x15b3", NETWORK)
        tree.nic(f"rocep{number}s0", device, "Ethernet")
    command = judged(tmp_path, {})["NVSHMEM's NICs"].command
    assert command == f"export {HCA_PREFIX}=rocep; unset {HCA_LIST} {HCA_PE_MAPPING}"


@pytest.mark.parametrize(
    ("name", "listed", "used"),
    [
        (HCA_LIST, "mlx5_1", "mlx5_1"),
        (HCA_LIST, "mlx5_0, mlx5_1", "mlx5_0"),
        (HCA_LIST, "^mlx5_0,^mlx5_1", "mlx5_1"),
        (HCA_LIST, "mlx5_0:1:1,mlx5_1:2", "mlx5_0"),
        (HCA_LIST, ",", "mlx5_0, mlx5_1"),
        (HCA_PE_MAPPING, "mlx5_1:1:8", "mlx5_1"),
    ],
)
def test_lists_are_taken_apart_as_by_nvshmem(tmp_path: Path, name: str, listed: str, used: str) -> None:
    """By commas alone, and with one ^ in front of all."""
    two_gpus_and_nics(tmp_path)
    assert judged(tmp_path, {name: listed})[CLASS].value == f"not set, as required by {used} on InfiniBand"


@pytest.mark.parametrize(
    ("given", "verdict"), [("", Verdict.GOOD), ("3", Verdict.INFO), ("16", Verdict.ERROR), ("x", Verdict.ERROR)]
)
def test_the_service_level(tmp_path: Path, given: str, verdict: Verdict) -> None:
    two_gpus_and_nics(tmp_path)
    assert judged(tmp_path, {SERVICE_LEVEL: given})[LEVEL].verdict is verdict


def test_the_settings_here_judge_no_other_machine(tmp_path: Path) -> None:
    two_gpus_and_nics(tmp_path)
    assert by_name(network(Files(tmp_path), None))["NVSHMEM's settings"].value == "not read: --root"
