"""Run a command and measure its time and the total memory of its processes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

SAMPLE_SECONDS = 1.0


@dataclass(frozen=True)
class Measured:
    """The cost of one command."""

    exit_code: int  # 128 + n if killed by signal n
    seconds: float
    peak_bytes: int


def _children() -> dict[int, list[int]]:
    children: dict[int, list[int]] = defaultdict(list)
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # the process has ended
                continue
            children[int(fields[1])].append(int(folder.name))
    return children


def _proportional_bytes(pid: int) -> int:
    """Return the memory of the process; each shared page is divided by the number of processes that share it."""
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def tree_bytes(root: int) -> int:
    """Return the memory of a process and all its descendants."""
    children = _children()
    pending, total = [root], 0
    while pending:
        pid = pending.pop()
        total += _proportional_bytes(pid)
        pending += children[pid]
    return total


def run(
    command: Sequence[str], cwd: Path, environment: Mapping[str, str] | None = None, log: Path | None = None
) -> Measured:
    """Run `command` with `environment` added to the environment of this process, and its output sent to `log` if given.

    The peak is the larger of the sampled total of the process tree and the exact peak of its largest process.
    """
    started = time.monotonic()
    with log.open("wb") if log else contextlib.nullcontext() as output:
        stderr = subprocess.STDOUT if log else None
        process = subprocess.Popen(
            command, cwd=cwd, env={**os.environ, **(environment or {})}, stdout=output, stderr=stderr
        )
    done = threading.Event()
    samples = [0]

    def sample() -> None:
        while not done.wait(SAMPLE_SECONDS):
            samples.append(tree_bytes(process.pid))

    sampler = threading.Thread(target=sample, daemon=True)
    sampler.start()
    try:
        _, status, usage = os.wait4(process.pid, 0)
    except KeyboardInterrupt:
        process.send_signal(signal.SIGINT)
        raise
    finally:
        done.set()
        sampler.join()
    code = os.waitstatus_to_exitcode(status)
    process.returncode = code
    return Measured(
        code if code >= 0 else 128 - code, time.monotonic() - started, max(*samples, usage.ru_maxrss * 1024)
    )
