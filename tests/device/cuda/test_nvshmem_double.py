"""The stand-in for NVSHMEM's host library, over which the adoption of NVSHMEM is tested: it behaves like NVSHMEM, and
refuses calls that are not allowed with NVSHMEM."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from builds import in_long
from deep_ep_py.device.jit import NvrtcUnavailableError, require_nvrtc
from launches import forked
from native_programs import NvshmemDoubles
from nvshmem_library import Golden, compile_module, module_source
from places import DATA

pytestmark = [pytest.mark.once, pytest.mark.thorough]

VERSIONS = sorted(path.stem for path in (DATA / "nvshmem").glob("*.json"))
OLDEST, NEWEST = VERSIONS[0], VERSIONS[-1]
BETWEEN = VERSIONS[1:-1]
IBGDA = {"NVSHMEM_IB_ENABLE_IBGDA": "1"}
# One PE per node, or two.
ALONE, IN_PAIRS = {"NVSHMEM_DOUBLE_PES_PER_NODE": "1"}, {"NVSHMEM_DOUBLE_PES_PER_NODE": "2"}
# A NIC that delays and reorders as much as a network may.
BAD_NIC = {"NVSHMEM_DOUBLE_NIC_RELAXED": "1", "NVSHMEM_DOUBLE_NIC_MAX_DELAY": "3", "NVSHMEM_DOUBLE_NIC_MTU": "64"}

Run = Callable[..., CompletedProcess[str]]


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return modules by version they are compiled for. NVRTC looks for the driver and must not find the stand-in."""
    try:
        require_nvrtc()
    except NvrtcUnavailableError as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("modules")
    for version in (OLDEST, NEWEST):
        (folder / f"{version}.cubin").write_bytes(compile_module(module_source(version)))
    bad = {
        "newer": module_source("3.9.0"),
        "other_major": module_source("2.4.5"),
        "small_device_state": module_source(OLDEST, device_bytes=775),
        "small_ibgda_state": module_source(OLDEST, ibgda_bytes=8383),
        "short_version": module_source(OLDEST).replace("[3] = {3, 4, 5}", "[2] = {3, 4}"),
        "none": "__device__ int nothing;",
    }
    for name, source in bad.items():
        (folder / f"bad_{name}.cubin").write_bytes(compile_module(source))
    return folder


@pytest.fixture
def run(
    idle_double: Path,
    nvshmem_doubles: NvshmemDoubles,
    modules: Path,
    workers: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Run:
    """Return a function that runs a scenario of the worker on a number of PEs."""

    def start(scenario: str, pes: int, version: str, *settings: dict[str, str]) -> CompletedProcess[str]:
        environment = nvshmem_doubles.environment(idle_double, version, tmp_path, NVSHMEM_SYMMETRIC_SIZE="16M")
        for name, value in {**environment, **{k: v for some in settings for k, v in some.items()}}.items():
            monkeypatch.setenv(name, value)
        return forked(workers / "nvshmem_calls.py", pes, scenario, str(modules / f"{OLDEST}.cubin"))

    return start


def succeeded(done: CompletedProcess[str]) -> list[str]:
    """Return the complaints of the stand-in."""
    assert done.returncode == 0, done.stdout + done.stderr
    return [line for line in done.stderr.splitlines() if line.startswith("nvshmem double: ")]


@pytest.mark.parametrize("version", VERSIONS)
def test_functions_of_each_release(nvshmem_doubles: NvshmemDoubles, version: str) -> None:
    """Exactly those that this library calls."""
    library = nvshmem_doubles.folder(version) / "libnvshmem_host.so.3"
    exported = set(re.findall(r" T (\w+)", subprocess.check_output(["nm", "-D", library], text=True)))
    called, ever = (Golden(release).functions for release in (version, NEWEST))
    assert exported & ever == called
    assert "SONAME" in (said := subprocess.check_output(["readelf", "-d", library], text=True))
    assert "[libnvshmem_host.so.3]" in said and "libcuda" not in said


def test_initialisations(run: Run) -> None:
    complaints = succeeded(run("initialisations", 2, OLDEST))
    assert len(complaints) == 4, complaints
    assert sum("before the device is initialized" in line for line in complaints) == 2
    assert sum("cannot join" in line for line in complaints) == 2


@pytest.mark.parametrize(
    ("pes", "settings"),
    [
        (4, IN_PAIRS),
        in_long(2, ALONE),
        in_long(2, {"NVSHMEM_DISABLE_P2P": "1"}),
        in_long(2, {"NVSHMEM_DOUBLE_CHUNK_LOG2": "21"}),
    ],
    ids=["pairs", "alone", "without P2P", "larger chunks"],
)
def test_memory(run: Run, pes: int, settings: dict[str, str]) -> None:
    complaints = succeeded(run("memory", pes, OLDEST, settings))
    assert len(complaints) == pes and all("no room for" in line for line in complaints)


@pytest.mark.parametrize("version", [OLDEST, NEWEST, *map(in_long, BETWEEN)])
def test_states(run: Run, version: str) -> None:
    assert not succeeded(run("states", 2, version, IBGDA))


def test_states_of_several_nics(run: Run) -> None:
    assert not succeeded(run("states", 4, NEWEST, IBGDA, {"NVSHMEM_DOUBLE_NICS": "2"}))


def test_states_without_ibgda(run: Run) -> None:
    assert not succeeded(run("states", 2, NEWEST))


@pytest.mark.parametrize("pes", [2, in_long(4)])
def test_queue_pairs_that_are_created(run: Run, pes: int) -> None:
    assert not succeeded(run("created_queue_pairs", pes, NEWEST, IBGDA, ALONE))


@pytest.mark.parametrize(
    ("pes", "version", "settings"),
    [
        in_long(2, OLDEST, ALONE | IBGDA),
        (4, NEWEST, ALONE | IBGDA | {"NVSHMEM_QP_DEPTH": "128"}),
        (4, OLDEST, IN_PAIRS | IBGDA | BAD_NIC),
        in_long(2, NEWEST, IBGDA | BAD_NIC | {"NVSHMEM_DISABLE_P2P": "1"}),
        in_long(2, OLDEST, ALONE | IBGDA | {"NVSHMEM_DOUBLE_CPU_DOORBELLS": "1"}),
        (2, OLDEST, IN_PAIRS),
    ],
    ids=["nodes of 1", "short rings", "nodes of 2, bad NIC", "without P2P", "CPU doorbells", "one node"],
)
def test_barriers(run: Run, pes: int, version: str, settings: dict[str, str]) -> None:
    assert not succeeded(run("barriers", pes, version, settings))


def test_wrong_calls(run: Run) -> None:
    complaints = succeeded(run("wrong_calls", 2, OLDEST, {"NVSHMEM_DOUBLE_STRICT": "1"}))
    for why in (
        "flags 0 without that of a unique id",
        "the arguments' version is 1<<16|24, expected 1<<16|144",
        "the unique id's version is 0<<16|0, expected 1<<16|128",
        "nvshmem_malloc: before nvshmemx_hostlib_init_attr",
        "all PEs must call the same",
        "alignment 24 is not a power of two",
        "unloaded before nvshmemx_cumodule_finalize",
        "the module is not registered",
    ):
        assert sum(why in line for line in complaints) >= 2, why


def test_modules_that_are_refused(run: Run) -> None:
    complaints = "\n".join(succeeded(run("refused_modules", 1, OLDEST)))
    for why in (
        "for version 3.9, the host library is 3.4",
        "for version 2.4",
        "nvshmemi_device_state_d has 775 bytes",
        "nvshmemi_ibgda_device_state_d has 8383 bytes",
        "nvshmemi_device_lib_version_d has 8 bytes, not 12",
        "the module has no nvshmemi_device_lib_version_d",
    ):
        assert why in complaints, complaints


def test_a_collective_call_of_one_pe(run: Run) -> None:
    complaints = succeeded(run("alone", 2, OLDEST, {"NVSHMEM_DOUBLE_SECONDS": "2"}))
    assert any("nvshmem_malloc on PE 0: has waited 2 s for PE 1" in line for line in complaints), complaints


def test_faults(run: Run) -> None:
    fault = {"NVSHMEM_DOUBLE_FAULT": "0,1,5,18", "NVSHMEM_DOUBLE_SECONDS": "5"}
    complaints = succeeded(run("faults", 2, NEWEST, IBGDA, ALONE, fault))
    assert len(complaints) == 1 and "has failed: remote invalid request" in complaints[0], complaints


@pytest.mark.parametrize("version", [OLDEST, in_long(NEWEST)])
def test_invalid_requests(run: Run, version: str) -> None:
    complaints = succeeded(run("invalid_requests", 2, version, IBGDA, ALONE))
    assert any("the doorbell is for queue pair" in line for line in complaints), complaints


def test_wanted_failures(run: Run) -> None:
    assert not succeeded(run("wanted_failures", 2, OLDEST))


def test_damaged_images(run: Run) -> None:
    assert not succeeded(run("damaged_images", 1, OLDEST))


def test_through_nvshmem4py(run: Run) -> None:
    if importlib.util.find_spec("nvshmem") is None:
        pytest.skip("nvshmem.bindings is not there (pip install --no-deps nvshmem4py-cu13)")
    assert not succeeded(run("through_nvshmem4py", 2, OLDEST, IBGDA, ALONE))
