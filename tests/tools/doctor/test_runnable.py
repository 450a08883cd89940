"""The conclusion of `doctor`, what can be run here, from findings on fictitious machines."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deep_ep_py.tools.doctor.findings import Finding, Section, Verdict
from deep_ep_py.tools.doctor.runnable import runnable
from deep_ep_py.tools.doctor.software import _torch
from machine_trees import by_name

pytestmark = pytest.mark.once

CPU, CUDA, MACHINES, NICS = "CPU tensors", "CUDA tensors", "several machines, by proxy", "NICs that kernels post to"
GOOD = {
    name: Finding(name, Verdict.GOOD, "all right")
    for name in (
        "kernel driver",
        "CUDA driver",
        "torch",
        "NVRTC",
        "libfabric",
        "providers, best first",
        "peer",
        "ibgda",
        "proxy",
        "address for other machines",
    )
}


def concluded(*bad: Finding, without: str = "") -> dict[str, Finding]:
    """Return what is concluded from findings that are good but for these."""
    found = {**GOOD, **{one.name: one for one in bad}}
    found.pop(without, None)
    return by_name(runnable([Section.of("One", [*found.values()][:4]), Section.of("Other", [*found.values()][4:])]))


def refused(found: dict[str, Finding]) -> dict[str, str]:
    return {name: one.value for name, one in found.items() if one.value != "yes"}


def test_a_machine_that_has_all() -> None:
    found = concluded()
    assert [*found] == [CPU, CUDA, MACHINES, NICS] and not refused(found)
    assert {one.verdict for one in found.values()} == {Verdict.GOOD}


def test_a_machine_without_gpus() -> None:
    none, driver = (
        Finding("GPUs", Verdict.ABSENT, "none by NVIDIA", "a reason"),
        Finding("CUDA driver", Verdict.ABSENT, ""),
    )
    found = concluded(none, driver, without="kernel driver")
    assert refused(found) == dict.fromkeys((CUDA, NICS), "no: GPUs: none by NVIDIA")
    assert found[CUDA] == Finding(CUDA, Verdict.ABSENT, "no: GPUs: none by NVIDIA")


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("torch", {CUDA, NICS}),
        ("NVRTC", {CUDA, NICS}),
        ("CUDA driver", {CUDA, NICS}),
        ("libfabric", {MACHINES}),
        ("providers, best first", {MACHINES}),
        ("proxy", {MACHINES}),
        ("address for other machines", {MACHINES}),
        ("ibgda", {NICS}),
        ("peer", {CPU}),
    ],
)
def test_what_is_in_the_way_is_named_with_the_command_that_helps(name: str, missing: set[str]) -> None:
    bad = Finding(name, Verdict.WARNING, "not so", "because", "do this:", "command")
    found = concluded(bad)
    assert refused(found) == dict.fromkeys(missing, f"no: {name}: not so")
    for one in missing:  # absent, since its own line counts as the warning
        assert found[one] == replace(bad, name=one, verdict=Verdict.ABSENT, value=f"no: {name}: not so")


def test_the_first_thing_in_the_way_counts() -> None:
    """A driver that is not loaded explains one that does not answer, and the prerequisites explain their number."""
    driver = Finding("kernel driver", Verdict.ERROR, "not loaded", "why", "load it:", "modprobe")
    found = concluded(driver, Finding("CUDA driver", Verdict.ERROR, "fails"), Finding("torch", Verdict.INFO, "old"))
    assert refused(found) == dict.fromkeys((CUDA, NICS), "no: kernel driver: not loaded")
    needs = Finding("ibgda needs a ConnectX", Verdict.INFO, "none with a link")
    found = concluded(Finding("ibgda", Verdict.INFO, "1 prerequisite missing"), needs)
    assert refused(found) == {NICS: "no: ibgda needs a ConnectX: none with a link"}


def test_a_gpu_that_only_the_driver_shows_is_one() -> None:
    """As in WSL, where /sys lists no GPU."""
    assert CUDA not in refused(concluded(Finding("GPUs", Verdict.ABSENT, "none by NVIDIA"), without="kernel driver"))


@pytest.mark.parametrize(
    ("version", "cuda", "available", "verdict"),
    [
        ("2.13.0", "13.0", True, Verdict.GOOD),
        ("2.13.0", "13.0", False, Verdict.INFO),
        ("2.13.0+cpu", None, False, Verdict.INFO),
    ],
)
def test_a_torch_that_finds_no_gpu_is_no_good(
    version: str, cuda: str | None, available: bool, verdict: Verdict
) -> None:
    assert _torch(version, cuda, available).verdict is verdict
