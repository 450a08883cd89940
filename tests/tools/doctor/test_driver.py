"""The queries of `doctor` to the CUDA driver, over a library that answers like one."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from deep_ep_py.device import nvml
from deep_ep_py.device.nvml import NvmlError
from deep_ep_py.tools.doctor.driver import (
    ALL_ORDERING,
    NO_ORDERING,
    OWNER_ORDERING,
    DriverFacts,
    DriverGpu,
    DriverUnavailableError,
    NoGpuError,
    read_driver,
)
from deep_ep_py.tools.doctor.findings import Finding, Verdict
from deep_ep_py.tools.doctor.visible import Peers, read_nvml, visible
from machine_trees import by_name

pytestmark = pytest.mark.once

# Two GPUs that are NVLink peers, but only the first can access the memory of the other atomically. Attributes and
# device handles are as odd as permitted, so that mixed-up numbers show.
_LIBRARY = r"""
#include <cstdio>
#include <cstring>
#ifndef RESULT_OF_INIT
#define RESULT_OF_INIT 0
#endif
#ifndef DEVICES
#define DEVICES 2
#endif
extern "C" {
int cuInit(unsigned flags) { return flags == 0 ? RESULT_OF_INIT : 1; }
int cuDriverGetVersion(int* version) { *version = 12080; return 0; }
int cuDeviceGetCount(int* count) { *count = DEVICES; return 0; }
int cuDeviceGet(int* device, int ordinal) { *device = 70 + ordinal; return ordinal < DEVICES ? 0 : 101; }
int cuDeviceGetName(char* name, int bytes, int device) { return std::snprintf(name, bytes, "GPU of %d", device) < 0; }
int cuDeviceGetPCIBusId(char* name, int bytes, int device) {
    return std::snprintf(name, bytes, "0000:%02X:00.0", device) < 0;
}
int cuDeviceGetAttribute(int* value, int which, int device) {
    switch (which) {
        case 116: *value = 1; return 0;
        case 118: *value = device == 70 ? 100 : 200; return 0;
        case 124: *value = device == 71; return 0;
        default: return 1;
    }
}
int cuDeviceCanAccessPeer(int* can, int device, int peer) { *can = device != peer; return device < 70 || peer < 70; }
#ifndef OLD
int cuDeviceGetP2PAttribute(int* value, int which, int device, int peer) {
    *value = device == 70 && peer == 71;
    return which != 3;
}
#endif
int cuGetErrorString(int result, const char** text) {
    *text = result == 803 ? "system has unsupported display driver" : nullptr;
    return *text == nullptr;
}
}
"""


def library(folder: Path, *defines: str) -> str:
    source, target = folder / "driver.cpp", folder / "driver.so"
    source.write_text(_LIBRARY)
    subprocess.run(["g++", "-shared", "-fPIC", *defines, str(source), "-o", str(target)], check=True)
    return str(target)


def test_two_gpus(tmp_path: Path) -> None:
    facts = read_driver(library(tmp_path))
    first = DriverGpu("GPU of 70", "0000:46:00.0", True, OWNER_ORDERING, dma_buf=False, fabric_handles=False)
    second = DriverGpu("GPU of 71", "0000:47:00.0", True, ALL_ORDERING, dma_buf=True, fabric_handles=False)
    assert facts == DriverFacts("12.8", (first, second), frozenset({(0, 1), (1, 0)}), frozenset({(0, 1)}))


@pytest.mark.parametrize(
    ("defines", "error", "text"),
    [
        (("-DRESULT_OF_INIT=803",), DriverUnavailableError, "cuInit fails: system has unsupported display driver"),
        (("-DRESULT_OF_INIT=999",), DriverUnavailableError, "cuInit fails: error 999"),
        (("-DRESULT_OF_INIT=100",), NoGpuError, "no GPU"),
        (("-DDEVICES=0",), NoGpuError, "no GPU"),
        (("-DOLD",), DriverUnavailableError, "it has no cuDeviceGetP2PAttribute"),
    ],
)
def test_a_driver_that_fails(tmp_path: Path, defines: tuple[str, ...], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        read_driver(library(tmp_path, *defines))


def test_no_driver_at_all() -> None:
    with pytest.raises(DriverUnavailableError, match=r"libnone\.so\.1"):
        read_driver("libnone.so.1")


def facts(gpus: int, access: Iterable[tuple[int, int]], orderings: Iterable[int] = ()) -> DriverFacts:
    numbers = [*orderings] or [OWNER_ORDERING] * gpus
    each = tuple(DriverGpu("H100", f"0000:0{n}:00.0", True, numbers[n], True, False) for n in range(gpus))
    return DriverFacts("13.0", each, frozenset(access), frozenset(access))


def no_nvml() -> Peers:
    raise NvmlError("libnvidia-ml.so.1: cannot open shared object file")


def found(one: DriverFacts, present: int = 0, read_all: Callable[[], Peers] = no_nvml) -> dict[str, Finding]:
    return by_name(visible(present or len(one.gpus), lambda: one, read_all))


def test_all_gpus_reach_each_other() -> None:
    said = found(facts(3, [(one, other) for one in range(3) for other in range(3) if one != other]))
    assert said["peer access"].verdict is Verdict.GOOD and said["atomics on peers"].verdict is Verdict.GOOD
    assert said["handles for other nodes"].verdict is Verdict.INFO


def test_gpus_that_do_not_reach_some_are_named_together() -> None:
    """Two pairs of GPUs, each with a bridge."""
    said = found(facts(4, [(0, 1), (1, 0), (2, 3), (3, 2)]))["peer access"]
    assert said.verdict is Verdict.WARNING
    assert said.value == "not from cuda:0, cuda:1 to cuda:2, cuda:3; not from cuda:2, cuda:3 to cuda:0, cuda:1"


def test_one_gpu_has_no_peers() -> None:
    said = found(facts(1, []), present=8)
    assert "peer access" not in said and said["hidden GPUs"].value == "7 of the machine's 8"


def test_hidden_gpus_are_known_from_nvml(idle_double: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over the stand-in for it, on a machine of 4 GPUs of which this process sees one."""
    monkeypatch.setattr(nvml, "library", lambda: nvml.Nvml(str(idle_double / nvml.LIBRARY)))
    monkeypatch.setenv("DOUBLE_MACHINE", "4")
    monkeypatch.setenv("DOUBLE_DEVICES", "1")
    one = facts(1, [])
    said = found(one, 4, read_nvml)
    assert said["hidden peers"].value == "NVML shows 4 GPUs, and is asked about them"
    assert said["peer access, NVML"].verdict is said["atomics on peers, NVML"].verdict is Verdict.GOOD
    monkeypatch.setenv("DOUBLE_PCIE", "1")
    said = found(one, 4, read_nvml)
    assert said["atomics on peers, NVML"].value == "not native for 8 of 12 pairs"
    monkeypatch.setenv("DOUBLE_APART", "1")
    said = found(one, 4, read_nvml)
    assert said["peer access, NVML"].value == "not from GPU0, GPU2 to GPU1, GPU3; not from GPU1, GPU3 to GPU0, GPU2"
    monkeypatch.setenv("DOUBLE_NVML_HIDES", "1")
    said = found(one, 4, read_nvml)
    assert "peer access, NVML" not in said and said["hidden peers"].value == "NVML does not show them either, only 1"


def test_without_nvml_hidden_gpus_are_a_warning() -> None:
    said = found(facts(1, []), present=8)["hidden peers"]
    assert said.verdict is Verdict.WARNING and "libnvidia-ml.so.1" in said.value and "count as unable" in said.reason
    assert found(facts(2, []), present=2)["hidden peers"].verdict is Verdict.INFO
    assert "hidden peers" not in found(facts(1, []))


@pytest.mark.parametrize(
    ("orderings", "verdict", "value"),
    [
        ((ALL_ORDERING, ALL_ORDERING), Verdict.GOOD, "ordered for all GPUs"),
        (
            (NO_ORDERING, OWNER_ORDERING),
            Verdict.INFO,
            "not ordered on cuda:0; ordered for the GPU that owns the memory on cuda:1",
        ),
    ],
)
def test_the_order_of_writes(orderings: tuple[int, ...], verdict: Verdict, value: str) -> None:
    said = found(facts(2, [], orderings))["writes of NICs"]
    assert (said.verdict, said.value) == (verdict, value)


@pytest.mark.parametrize(
    ("error", "present", "verdict"),
    [
        (NoGpuError("none"), 0, Verdict.ABSENT),
        (NoGpuError("none"), 1, Verdict.WARNING),
        (DriverUnavailableError("not there"), 0, Verdict.ABSENT),
        (DriverUnavailableError("not there"), 2, Verdict.ERROR),
    ],
)
def test_a_missing_driver_matters_where_there_are_gpus(error: Exception, present: int, verdict: Verdict) -> None:
    def read() -> DriverFacts:
        raise error

    said = by_name(visible(present, read))["CUDA driver"]
    assert said.verdict is verdict and ("1 GPU:" in said.reason) == (present == 1)
