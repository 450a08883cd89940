"""The entire GPU path over the stand-in for the driver: Buffer, JIT, NVRTC, launcher, driver, PTX. The stand-in
interprets the compiler's PTX, and races between its kernels are found.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from builds import INTERPRETED, LONG
from deep_ep_py.device.jit import NvrtcUnavailableError, require_nvrtc
from launches import on_threads
from low_latency_gpu import WATCHED

pytestmark = pytest.mark.once

SEED = {"DOUBLE_WATCH": "1"}
TOGETHER = {**SEED, "DOUBLE_SERIAL": "1"}
NAMES = () if LONG else ("uneven_tokens",)


@pytest.fixture(scope="module", autouse=True)
def nvrtc() -> None:
    try:
        require_nvrtc()
    except NvrtcUnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(INTERPRETED, "1")
    return tmp_path / "log"


@pytest.mark.thorough
def test_ranks_as_threads(double: Path, workers: Path, log: Path) -> None:
    printed = on_threads(double, workers / "ranks_as_threads.py", log, *NAMES, seconds=1800)
    assert set(printed.split()) >= set(NAMES)


@pytest.mark.thorough
@pytest.mark.skipif(not LONG, reason="like its neighbors: `make test-long`")
def test_ranks_in_one_launch(double: Path, workers: Path, log: Path) -> None:
    on_threads(double, workers / "ranks_in_one_launch.py", log, seconds=1800, **TOGETHER)


@pytest.mark.thorough
def test_low_latency_mode_in_one_launch(double: Path, workers: Path, log: Path) -> None:
    names = WATCHED if LONG else WATCHED[:1]
    program = str(workers / "gpu_case.py")
    queues = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    printed = on_threads(double, workers / "gpu_on_double.py", log, program, *names, seconds=1800, **TOGETHER, **queues)
    assert tuple(printed.split()) == names


def test_what_modules_do(double: Path, workers: Path, log: Path) -> None:
    """Modules are interpreted; races are found if the stand-in is asked to look for them."""
    assert on_threads(double, workers / "ptx_on_double.py", log) == "word 7\n"
    printed = on_threads(double, workers / "ptx_on_double.py", log, **SEED)
    assert "data race: it writes memory accessed by a thread of rank" in printed and "kernel.cu:7" in printed, printed


@pytest.mark.thorough
def test_stages_of_kernels(double: Path, workers: Path, log: Path, tmp_path: Path) -> None:
    """The PTX that is compiled to note them."""
    program = workers / "staged.py"
    found = on_threads(double, program, log, str(tmp_path), seconds=600, DEEP_EP_STAGES="on", **SEED)
    assert found.count("('dispatch', 'store rows')") == 2 and found.count("('notify', 'await counts')") == 2
