"""The findings of `doctor` on GPUs and on the paths to their memory, on fictitious machines."""

from __future__ import annotations

from pathlib import Path

import pytest

from deep_ep_py.base.machine_files import Files
from deep_ep_py.tools.doctor.findings import Finding, Verdict
from deep_ep_py.tools.doctor.gpus import gpus
from deep_ep_py.tools.doctor.nvshmem import Process
from machine_trees import Tree, by_name, efa, two_gpus_and_nics

pytestmark = pytest.mark.once

WITH_NVSHMEM, WITHOUT = Process({}, "nvidia-nvshmem-cu13 3.4.5"), Process({}, None)
DOORBELLS, MEMORY = "doorbells from GPUs", "ConnectX to GPU memory"


def found_in(root: Path, process: Process | None = WITH_NVSHMEM) -> dict[str, Finding]:
    return by_name(gpus(Files(root), process))


def test_two_gpus(tmp_path: Path) -> None:
    two_gpus_and_nics(tmp_path)
    found = found_in(tmp_path)
    assert found["kernel driver"].value == "570.86.15, open kernel modules"
    assert found["GPU 0000:a8:00.0"].value == "NVIDIA H100 80GB HBM3, NUMA node 1"
    assert found[MEMORY].value == "nvidia_peermem is loaded"


@pytest.mark.parametrize("number", [1, 2])
def test_gpus_without_a_driver(tmp_path: Path, number: int) -> None:
    tree = Tree(tmp_path)
    for index in range(number):
        tree.gpu("pci0000:00/0000:00:1e.0", f"0000:0{index + 1}:00.0")
    found = found_in(tmp_path)["kernel driver"]
    assert found.verdict is Verdict.ERROR
    assert found.value.endswith("there is 1 GPU" if number == 1 else "there are 2 GPUs")


@pytest.mark.parametrize(
    ("words", "good"),
    [
        ("PeerMappingOverride=1;", True),
        ("RMConnectToSmu=1; PeerMappingOverride=1", True),
        ("PeerMappingOverride=10;", False),
        ("PeerMappingOverride=0;", False),
        ("NotPeerMappingOverride=1;", False),
        ("", False),
    ],
)
def test_doorbells(tmp_path: Path, words: str, good: bool) -> None:
    tree, _ = two_gpus_and_nics(tmp_path)
    tree.driver(words=words)
    with_nvshmem, without, of_a_copy = (found_in(tmp_path, one)[DOORBELLS] for one in (WITH_NVSHMEM, WITHOUT, None))
    assert with_nvshmem.verdict is (Verdict.GOOD if good else Verdict.WARNING)
    assert without.verdict is of_a_copy.verdict is (Verdict.GOOD if good else Verdict.INFO)
    # A separate file would override settings made elsewhere.
    assert with_nvshmem.command.startswith("echo") == (not good and not words)


@pytest.mark.parametrize(
    ("opened", "kernel", "peermem", "verdict", "text"),
    [
        (True, "6.8.0-45", False, Verdict.GOOD, "dma-buf, by the open kernel modules"),
        (True, "5.12.0", False, Verdict.GOOD, "dma-buf, by the open kernel modules"),
        (True, "5.4.0-100", False, Verdict.INFO, "requires Linux 5.12 or newer"),
        (True, "5.4.0-100", True, Verdict.GOOD, "nvidia_peermem is loaded"),
        (False, "6.8.0-45", False, Verdict.INFO, "requires NVIDIA's open kernel modules"),
    ],
)
def test_the_way_from_nics_to_memory(
    tmp_path: Path, opened: bool, kernel: str, peermem: bool, verdict: Verdict, text: str
) -> None:
    tree, _ = two_gpus_and_nics(tmp_path)
    tree.driver(opened=opened)
    tree.file("/proc/sys/kernel/osrelease", kernel + "\n")
    if not peermem:
        (tmp_path / "sys/module/nvidia_peermem/version").unlink()
        (tmp_path / "sys/module/nvidia_peermem").rmdir()
    found = found_in(tmp_path)[MEMORY]
    assert found.verdict is verdict and found.value.endswith(text)


@pytest.mark.parametrize(
    ("provider", "verdict", "text"),
    [
        ("NVIDIA peermem\n", Verdict.GOOD, "by NVIDIA peermem"),
        ("\n", Verdict.INFO, "knows no GPU driver"),
        (None, Verdict.INFO, "no dma-buf"),
    ],
)
def test_the_way_from_efa_to_memory(tmp_path: Path, provider: str | None, verdict: Verdict, text: str) -> None:
    tree = efa(tmp_path)
    if provider is not None:
        tree.file("/sys/class/infiniband/rdmap0s31/device/p2p", provider)
    found = found_in(tmp_path)
    assert found["rdmap0s31 to GPU memory"].verdict is verdict and text in found["rdmap0s31 to GPU memory"].value
    assert MEMORY not in found and DOORBELLS not in found


@pytest.mark.parametrize(("channels", "text"), [(1, "IMEX has 1 channel here"), (2, "IMEX has 2 channels here")])
def test_multi_node_nvlink(tmp_path: Path, channels: int, text: str) -> None:
    tree, _ = two_gpus_and_nics(tmp_path)
    for channel in range(channels):
        tree.file(f"/dev/nvidia-caps-imex-channels/channel{channel}")
    assert found_in(tmp_path)["multi-node NVLink"].value == text
