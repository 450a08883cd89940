"""Ranks that share a GPU have a queue each: the variable that requests them is set before anything uses CUDA."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from deep_ep_py.__main__ import _ranks_share_a_gpu
from deep_ep_py.device import hardware_queues
from forks import run_python
from places import ROOT, python_path

pytestmark = pytest.mark.once

ENTRIES = {
    "rates": ["-m", "deep_ep_py", "rates", "--dry-run"],
    "pytest": ["-m", "pytest", "-q", "tests/device/gpu/test_gpu.py"],
    "gpu_lab": ["-m", "benchmarks.gpu_lab", "--only=posting"],
}


@pytest.fixture(scope="module")
def driver(idle_double: Path) -> Path:
    """Return the folder of the stand-in for libcuda.so.1; its kernels do nothing."""
    return idle_double


def environment_of(driver: Path, log: Path, *paths: Path, **variables: str) -> dict[str, str]:
    left = {name: value for name, value in os.environ.items() if name != "CUDA_DEVICE_MAX_CONNECTIONS"}
    return {
        **left,
        "LD_LIBRARY_PATH": str(driver),
        "DOUBLE_LOG": str(log),
        "PYTHONPATH": python_path(*paths),
        **variables,
    }


@pytest.mark.thorough
def test_every_entry_asks_for_queues_before_cuda_is_used(driver: Path, workers: Path, tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "nvidia-smi").write_text("#!/bin/sh\necho A GPU, 1.2, 3 MiB\n")
    (tools / "nvidia-smi").chmod(0o755)

    def seen(entry: str) -> str:
        log = tmp_path / entry
        variables = {"PATH": f"{tools}:{os.environ['PATH']}"}
        environment = environment_of(driver, log, workers / "torch_with_cuda", **variables)
        arguments = [*ENTRIES[entry], *([f"--out={tmp_path / 'out'}"] if entry == "gpu_lab" else [])]
        done = subprocess.run(
            [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
        )
        assert log.exists(), (entry, done.stdout, done.stderr)
        return log.read_text().partition("\n")[0]

    with ThreadPoolExecutor(2) as pool:
        found = dict(zip(ENTRIES, pool.map(seen, ENTRIES)))
    assert found == dict.fromkeys(ENTRIES, "cuInit connections=32")


def test_which_commands_restart() -> None:
    for arguments in (["rates"], ["canary"], ["bench-posting", "--requests=64"], ["bench", "--device", "cuda"]):
        assert _ranks_share_a_gpu(arguments), arguments
    assert _ranks_share_a_gpu(["bench", "--ranks=2", "--device=cuda"])
    for arguments in ([], ["--help"], ["bench", "--device=cpu"], ["compile", "--all"], ["shim"]):
        assert not _ranks_share_a_gpu(arguments), arguments


def said_by(program: str, environment: dict[str, str]) -> list[str]:
    done = run_python(["-c", program], environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_library_sets_them_or_says_that_it_is_late(driver: Path, tmp_path: Path) -> None:
    program = """
import ctypes, logging, os, sys
logging.basicConfig(stream=sys.stdout, format="%(message)s")
from deep_ep_py.device.hardware_queues import VARIABLE, driver_initialised, provide_hardware_queues
print(driver_initialised())
provide_hardware_queues()
cuda = ctypes.CDLL("libcuda.so.1")
print(os.environ.pop(VARIABLE), driver_initialised())
cuda.cuInit(0)
print(driver_initialised())
provide_hardware_queues()
print(os.environ[VARIABLE])
"""
    said = said_by(program, environment_of(driver, tmp_path / "log"))
    expected = "CUDA_DEVICE_MAX_CONNECTIONS=None: expected 32, set before this process uses CUDA"
    late = f"{expected}; it is set now, which may be too late: ranks that share a GPU may time out"
    assert said == ["False", "32 False", "True", late, "32"]


def test_a_program_restarts_once_and_in_full(driver: Path, tmp_path: Path) -> None:
    """With its arguments; and not at all if there is no driver."""
    program = tmp_path / "program.py"
    module = Path(hardware_queues.__file__)
    program.write_text(  # without the package, because that imports torch
        f"import os, sys\nsys.path.insert(0, {str(tmp_path)!r})\nfrom queues import restart_with_queues\n"
        "print(os.environ.get('CUDA_DEVICE_MAX_CONNECTIONS'), sys.argv[1:])\nrestart_with_queues()\n"
    )
    (tmp_path / "queues.py").write_text(module.read_text())
    for folder, expected in ((driver, ["None ['a', 'b c']", "32 ['a', 'b c']"]), (tmp_path, ["None ['a', 'b c']"])):
        environment = environment_of(folder, tmp_path / "log")
        command = [sys.executable, str(program), "a", "b c"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
        assert done.stdout.splitlines() == expected, done.stderr


def test_more_ranks_than_queues_are_refused() -> None:
    from deep_ep_py.testing import run_ranks

    with pytest.raises(ValueError, match="n=33: expected at most 32 ranks on one GPU, its number of hardware queues"):
        run_ranks(33, lambda group: None, device="cuda")
