"""Starts workers: with torchrun, on one or several nodes, forked, or over the stand-in for the driver."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from builds import BUILD, SANITIZED
from fork_server import TEARDOWN
from forks import run_python
from places import ROOT, SUPPORT, python_path

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


def shared_memory() -> set[str]:
    """Name the shared memory that exists, except torchrun's own semaphores, which come and go, and what libfabric has
    made for processes that still run: those of a test beside this one.
    """
    directory = Path("/dev/shm")
    names = {path.name for path in directory.iterdir()} if directory.is_dir() else set()
    return {name for name in names if not name.startswith("sem.") and not _is_of_a_running_process(name)}


def _is_of_a_running_process(name: str) -> bool:
    process, colon, _ = name.partition(":")
    return bool(colon) and process.isdigit() and Path("/proc", process).exists()


def torchrun(script: Path, ranks: int, *arguments: str, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    """Run a worker script on `ranks` processes of the build under test and return the completed process."""
    command = [*TORCHRUN, "--standalone", f"--nproc-per-node={ranks}", str(script), *arguments]
    return subprocess.run(command, env=of_ranks(), capture_output=True, text=True, timeout=timeout)


def forked(
    script: Path, ranks: int, *arguments: str, timeout: float = 240, teardown: bool = False
) -> subprocess.CompletedProcess[str]:
    """As `torchrun`, but faster: torch has been imported. Sanitizers' runtimes want processes of their own.

    With `teardown`, the interpreters of the ranks end as they do in processes of their own.
    """
    if SANITIZED:
        return torchrun(script, ranks, *arguments, timeout=timeout)
    command = [str(SUPPORT / "fork_torchrun.py"), str(ranks), str(script), *arguments]
    return run_python(command, of_ranks() | ({TEARDOWN: "1"} if teardown else {}), timeout=timeout)


def torchrun_nodes(
    nodes: int,
    ranks_per_node: int,
    logs: Path,
    *arguments: str,
    timeout: float = 240,
    master: str = "localhost",
    on_node: Callable[[int, list[str]], list[str]] = lambda node, command: command,
) -> list[subprocess.CompletedProcess[str]]:
    """Run a launcher for each node, and return the completed processes.

    The output of their processes also goes to files in `logs`. At the timeout all launchers are killed, and their
    output so far is returned. `on_node` turns a command into one that runs it on a node; by default all nodes are on
    this machine.
    """
    size = [f"--nnodes={nodes}", f"--nproc-per-node={ranks_per_node}"]
    address = [f"--master-addr={master}", f"--master-port={free_port()}"]
    until = time.monotonic() + timeout
    done = []
    with ExitStack() as stack:
        launchers = []
        for node in range(nodes):
            shown = ["--tee=3", f"--log-dir={logs / str(node)}"]
            command = on_node(node, [*TORCHRUN, *size, f"--node-rank={node}", *address, *shown, *arguments])
            output = stack.enter_context((logs / f"launcher_{node}.txt").open("w+"))
            launcher = subprocess.Popen(command, env=of_ranks(), stdout=output, stderr=subprocess.STDOUT, cwd=ROOT)
            stack.enter_context(launcher)
            stack.callback(launcher.kill)
            launchers.append((launcher, output))
        for launcher, output in launchers:
            try:
                launcher.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                launcher.kill()
                launcher.wait()
            output.seek(0)
            done.append(subprocess.CompletedProcess(launcher.args, launcher.returncode, output.read()))
    return done


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return int(found.getsockname()[1])


def of_ranks() -> dict[str, str]:
    return {**os.environ, "DEEP_EP_BUILD": BUILD, "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path()}


def on_threads(double: Path, worker: Path, log: Path, *arguments: str, seconds: float = 240, **variables: str) -> str:
    """Run a worker whose ranks are threads, over the stand-in for the driver, and return its output."""
    machine = {"LD_LIBRARY_PATH": str(double), "DOUBLE_MULTIPROCESSORS": "132", "DOUBLE_LOG": str(log)}
    environment = {**os.environ, "PYTHONPATH": python_path(), **machine, **variables}
    done = run_python([str(worker), *arguments], environment, timeout=seconds)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
