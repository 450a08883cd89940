from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from builds import BUILD, EXAMPLES, INTERPRETED, SANITIZED
from deep_ep_py.base.native import C
from deep_ep_py.device.hardware_queues import needs_restart, restart_with_queues
from interpreted import interpreted
from native_programs import NvshmemDoubles, build_driver_double
from nvshmem_runs import Nvshmem, compile_probe
from places import TESTS, WORKERS
from tiers import beyond_coverage, file_of, function_of, runs

# No deadline: the time of an example is mostly that of the schedule it draws. The examples are the same on every run,
# so that a failure found once stays found.
settings.register_profile(
    "deep_ep_py",
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("deep_ep_py")


# Folders of which most tests compile something, or start a stand-in or processes.
SLOW_FOLDERS = ("packaging", "device/cuda", "e2e")
# Tests of Python above the kernels, which run the same kernels as the tests of the two modes.
ABOVE_KERNELS = ("layers", "tools/profile", "modes/low_latency/test_serving_engines.py")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "timed: measures time; in the fast build nothing else runs beside it")
    config.addinivalue_line("markers", "slow: left out by `make test-fast`")
    config.addinivalue_line("markers", "scenarios: runs the program of tests/native/protocol")
    covers = "covers: of a cross product `make test` runs as few items as it takes for every value to occur"
    config.addinivalue_line("markers", covers)
    config.addinivalue_line("markers", "thorough: left to `make test-all` by `make test`")
    overwrites = "overwrites: data in flight to ranks that are given up is overwritten, which is a race"
    config.addinivalue_line("markers", overwrites)
    config.addinivalue_line("markers", "long: run by `make test-long`, with hundreds of trials instead of a few")
    # Must precede the import of any module that asks torch for a GPU, which initializes CUDA.
    of_pytest = any("pytest" in argument for argument in sys.orig_argv) and not hasattr(config, "workerinput")
    if of_pytest and needs_restart():
        if capture := config.pluginmanager.getplugin("capturemanager"):
            capture.stop_global_capturing()  # otherwise its redirections would outlive the restart
        restart_with_queues()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if any(item.path.resolve().is_relative_to(TESTS / folder) for folder in SLOW_FOLDERS):
            item.add_marker("slow")
            if SANITIZED:  # each process starts slowly
                item.add_marker("thorough")
        if SANITIZED and any(item.path.resolve().is_relative_to(TESTS / above) for above in ABOVE_KERNELS):
            item.add_marker("thorough")
        # Compiling this program takes from half a minute to minutes. It runs the kernels that other tests run as well.
        if item.get_closest_marker("scenarios"):
            item.add_marker("thorough")
    covers = [item for item in items if item.get_closest_marker("covers")]
    running = [item for item in items if runs(item)]
    for item in beyond_coverage(running, file_of) if SANITIZED else beyond_coverage(covers, function_of):
        item.add_marker("thorough")


def pytest_collection_finish() -> None:
    # Garbage is collected in front of every run of ranks: torch and the tests themselves need not be looked through.
    gc.freeze()


def pytest_report_header() -> str:
    return f"deep_ep_py build: {BUILD}"


@pytest.fixture(scope="session")
def build() -> str:
    """Return the name of the build under test: fast, exact, tsan or asan."""
    return BUILD


@pytest.fixture(autouse=os.environ.get(INTERPRETED, "") != "")
def kernels_are_ptx(request: pytest.FixtureRequest) -> Iterator[None]:
    """Have Buffers on the CPU launch the compiler's PTX, and allow no races, where the environment asks for it."""
    if C.WARP_SIZE != 32:
        yield
        return
    with interpreted():
        C.ptx.watch(request.node.get_closest_marker("overwrites") is None, seed=1)
        yield
        C.ptx.watch(False)


@pytest.fixture(scope="session")
def workers() -> Path:
    """Return the folder of the scripts that tests run under torchrun."""
    return WORKERS


@pytest.fixture(scope="session")
def idle_double() -> Path:
    """Return the folder of the stand-in for libcuda.so.1 whose kernels do nothing."""
    return build_driver_double(runs_kernels=False)


@pytest.fixture(scope="session")
def double() -> Path:
    """Return the folder of the stand-in for libcuda.so.1, which runs the library's kernels on a CPU."""
    return build_driver_double(runs_kernels=True)


@pytest.fixture(scope="session")
def nvshmem_doubles() -> NvshmemDoubles:
    """Return the folders of the stand-ins for libnvshmem_host.so.3, by release."""
    return NvshmemDoubles()


@pytest.fixture(scope="session")
def compiled_probe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the path of the compiled module that reads NVSHMEM's memory."""
    return compile_probe(tmp_path_factory.mktemp("probe") / "probe.cubin")


@pytest.fixture
def nvshmem(
    double: Path,
    nvshmem_doubles: NvshmemDoubles,
    compiled_probe: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Nvshmem:
    """Run workers over the stand-ins for the driver and for NVSHMEM's host library."""
    return Nvshmem(double, nvshmem_doubles, compiled_probe, tmp_path, monkeypatch)
