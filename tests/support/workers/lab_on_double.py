"""Runs `python -m benchmarks.gpu_lab` over the stand-in for the driver, on as many GPUs as the first argument says.

Each experiment is a fork of this process, which has imported all they need and started no thread, instead of a new
interpreter that would take seconds to import torch; so is each rank of torchrun. Nothing is built. The library's
kernels run, on small sizes; those of the probes do nothing.
"""

from __future__ import annotations

import importlib
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_on_threads import CpuTimer, measure_copy

import harness
import pretend_gpu
import pretend_torch_cuda
from benchmarks.gpu_lab import sizes
from deep_ep_py.device import canary
from deep_ep_py.device.jit import CompiledKernel, Resources
from deep_ep_py.tools.bench import gpu_timing, rates
from deep_ep_py.tools.cli import canary as cli_canary

sizes.RANKS, sizes.HIDDEN, sizes.TOPK, sizes.EXPERTS = 4, 128, 4, 16
sizes.NORMAL_TOKENS, sizes.LOW_LATENCY_TOKENS = 64, 16
sizes.NORMAL_BLOCKS, sizes.BLOCKS_PER_GPU = 2, 2
sizes.NORMAL_ITERATIONS, sizes.LOW_LATENCY_ITERATIONS = 2, 2
sizes.SHAPE = (f"--hidden={sizes.HIDDEN}", f"--topk={sizes.TOPK}", f"--experts={sizes.EXPERTS}")

from benchmarks.gpu_lab import abort_word, combine_fence, experiments, kill_and_recover, probe, runner  # noqa: E402
from benchmarks.gpu_lab.__main__ import main as lab  # noqa: E402

# What the forks would import otherwise, each for itself.
for name in (
    *("_pytest.assertion.rewrite", "hypothesis", "interpreted", "native_programs", "nvshmem_runs"),
    *("decode", "elastic", "fp8", "gpu_ranks", "graphs", "low_latency_gpu", "deep_ep_py.tools.bench.cli"),
    *("deep_ep_py.examples.train_model", "deep_ep_py.moe", "deep_ep_py.ops", "pytest_timeout", "torch._dynamo"),
):
    importlib.import_module(name)

GPUS = int(sys.argv[1])
RATES_ITERATIONS = 5
PATIENCE = 8
"""Limits are for GPUs: here kernels run on a CPU that others use too."""


class Forked:
    """A child that runs a function, with the part of `subprocess.Popen` that experiments use."""

    def __init__(
        self, body: Callable[[], Any], environment: dict[str, str], log: Any = None, leads: bool = False
    ) -> None:
        (here_out, there_in), (there_out, here_in) = (os.pipe(), os.pipe()) if log is None else ((0, 0), (0, 0))
        sys.stdout.flush()
        sys.stderr.flush()
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            if leads:
                os.setsid()
            if log is None:
                os.close(here_out)
                os.close(here_in)
                os.dup2(there_out, 0)
                os.dup2(there_in, 1)
                sys.stdin = os.fdopen(0)
            else:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
            self._be(body, environment)
        if log is None:
            os.close(there_in)
            os.close(there_out)
            self.stdout, self.stdin = os.fdopen(here_out), os.fdopen(here_in, "w")

    @staticmethod
    def _be(body: Callable[[], Any], environment: dict[str, str]) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.environ.clear()
        os.environ.update(environment)
        torch.set_num_threads(1)  # makes torch's pool of threads anew, which two threads of ranks must not do at once
        code = 1
        try:
            code = int(body() or 0)
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(bool(ended.code))
        except BaseException:  # noqa: B036 - it ends here
            traceback.print_exc()
        with suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)

    def wait(self, timeout: float | None = None) -> int:
        until = None if timeout is None else time.monotonic() + PATIENCE * timeout
        while self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid == self.pid:
                self.returncode = os.waitstatus_to_exitcode(status)
            elif until is not None and time.monotonic() > until:
                raise subprocess.TimeoutExpired("forked", timeout or 0.0)
            else:
                time.sleep(0.01)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class RatesTimer:
    """A replacement for EventTimer with fabricated times: calls of many tokens take longer than those of a single one,
    which come first."""

    def __init__(self) -> None:
        RatesTimer.calls += 1

    calls = 0

    def time(self, launch: Callable[[], Any], stream: Any, align: Callable[[], Any]) -> tuple[Any, float]:
        del stream
        align()
        return launch(), 0.01 if RatesTimer.calls <= rates._WARMUP + RATES_ITERATIONS else 1.0


def pretend() -> None:
    """Have GPUs, whose kernels are the library's."""
    pretend_torch_cuda.install([f"GPU-{index}" for index in range(GPUS)])
    pretend_gpu.install(compile_kernels=False)
    pretend_gpu.PretendGpu.comm_stream = None
    gpu_timing.GpuTimer, gpu_timing.measure_copy = CpuTimer, measure_copy
    rates.EventTimer = RatesTimer  # type: ignore[assignment, misc]
    harness.Trial.on = lambda self, device: self  # type: ignore[method-assign, assignment]
    probe.large_bytes = lambda: 1 << 20
    abort_word.SECONDS = 0.05
    probe.gpu = lambda: torch.device("cpu", 0)
    probe.compiled = compiled_by_nobody
    combine_fence.start_server = start_server
    kill_and_recover.start_rank = start_rank
    cli_canary.observe = look_here


def look_here() -> dict[str, Any]:
    """Probe the GPU, in this process."""
    canary._TIMEOUT_NS *= 4
    found: dict[str, Any] = {"errors": []}
    for finding in canary.look():
        found.update(finding)
    return found


def compiled_by_nobody(source: str, expression: str, context: Any) -> CompiledKernel:
    """Return a kernel without code, since NVRTC must not find the stand-in for the driver."""
    name = expression.removeprefix("gpu_lab::")
    symbol = f"_ZN7gpu_lab{len(name)}{name}E"
    nothing = Resources(0, 0, 0, 0, 0, 0, 0, 0)
    return CompiledKernel(source, context.architecture, symbol, b"\x7fELF", nothing, 0.0, "")


def run(command: list[str]) -> Any:
    """Run a command of an experiment in this process."""
    words = [{"--seconds=18": "--seconds=3"}.get(word, word) for word in command[1:]]
    if command[0] != experiments.PYTHON:
        os.execvp(command[0], command)
    if words[:2] == ["-m", "benchmarks.gpu_lab.build"]:
        return 0
    if words[:2] == ["-m", "torch.distributed.run"]:
        return torchrun(words[3:])
    pretend()
    if words[0] != "-m":
        if "--device=cuda:own" in words:
            sees = {"DOUBLE_DEVICES": "1", "DOUBLE_MACHINE": os.environ["WORLD_SIZE"]}
            os.environ.update(sees, DOUBLE_FIRST_GPU=os.environ["RANK"])
        sys.argv = ["--pretend-gpu" if one.startswith("--device=cuda:") else one for one in words]
        return runpy.run_path(words[0], run_name="__main__") and 0
    module, arguments = words[1], words[2:]
    if module == "pytest":
        return pytest.main([*arguments, "-p", "no:cacheprovider", "-q"])
    if module.startswith("benchmarks.gpu_lab."):
        return importlib.import_module(module).main(arguments)
    sys.argv = words[1:]
    return runpy.run_module(module, run_name="__main__", alter_sys=True) and 0


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return int(found.getsockname()[1])


def torchrun(words: list[str]) -> int:
    """Run a program on a fork per GPU, as torchrun runs it."""
    count = int(words[0].removeprefix("--nproc-per-node="))
    common = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "localhost", "MASTER_PORT": free_port()}
    ranks = []
    for rank in range(count):
        given = {**common, "RANK": rank, "LOCAL_RANK": rank, "TORCHELASTIC_RUN_ID": "lab"}
        environment = {**os.environ, **{name: str(value) for name, value in given.items()}}
        ranks.append(Forked(lambda: run([experiments.PYTHON, *words[1:]]), environment, sys.stdout))
    return max(abs(rank.wait()) for rank in ranks)


def start_process(command: list[str], environment: dict[str, str], log: Any) -> Forked:
    return Forked(lambda: run(command), environment, log, leads=True)


def start_rank(environment: dict[str, str]) -> Forked:
    return Forked(lambda: kill_and_recover.main(["--be-a-rank"]), {**os.environ, **environment})


def start_server(folder: Path) -> Forked:
    assert (folder / combine_fence.HEADER).exists()
    return Forked(lambda: combine_fence.main(["--serve"]), dict(os.environ))


if __name__ == "__main__":
    torch.set_num_threads(1)  # before anything is computed: threads do not outlive a fork
    runner.start_process = start_process  # type: ignore[assignment]
    lab(sys.argv[2:])
