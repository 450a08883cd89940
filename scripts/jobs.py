"""Run commands beside each other, as many at once as there are cores and memory for, the longest first.

Each job is a process group of its own with its output in a file. A job that fails is reported at once and the others go
on, except those that come after it; Ctrl-C ends all of them, and all processes that they have started.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

POLL_SECONDS = 0.1
SAMPLE_SECONDS = 5.0  # reading the memory of a sanitized process takes many milliseconds
LAST_SECONDS = 10.0  # for processes that are interrupted, before they are killed
BYTES_PER_JOB = 3 << 30  # the peak of the largest shard of tests, rounded up


@dataclass(frozen=True)
class Job:
    """A command that passes or fails, and what must be known to choose when it runs."""

    name: str
    command: Sequence[str]
    seconds: float
    """How long it is expected to take."""
    environment: Mapping[str, str] = field(default_factory=dict)
    after: frozenset[str] = frozenset()
    """Names of jobs that must have passed. A name that is not among the jobs counts as passed."""
    alone: bool = False
    """Nothing else runs beside it: it measures time, or keeps all cores busy itself."""


@dataclass(frozen=True)
class Finished:
    """The outcome of a job."""

    job: Job
    exit_code: int | None
    """128 + n if killed by signal n; None if it was left out because a job before it had failed."""
    seconds: float = 0.0
    peak_bytes: int = 0
    """Of all its processes together, sampled. The kernel's own peak counts what this process had before exec."""


def slots() -> int:
    """Return how many jobs may run at once on this machine."""
    with open("/proc/meminfo") as file:
        available = next(int(line.split()[1]) << 10 for line in file if line.startswith("MemAvailable:"))
    return max(1, min(len(os.sched_getaffinity(0)), available // BYTES_PER_JOB))


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


class _Running:
    """A job's process group. Its output goes to a file."""

    def __init__(self, job: Job, folder: Path, log: Path) -> None:
        self.job = job
        self._started = time.monotonic()
        self._peak_bytes = 0
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                job.command,
                cwd=folder,
                env={**os.environ, **job.environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def sample(self) -> None:
        self._peak_bytes = max(self._peak_bytes, tree_bytes(self._process.pid))

    def finished(self) -> Finished | None:
        """Return the outcome if the process has ended."""
        code = self._process.poll()
        if code is None:
            return None
        self.signal(signal.SIGKILL)  # what it has left behind
        seconds = time.monotonic() - self._started
        return Finished(self.job, code if code >= 0 else 128 - code, seconds, self._peak_bytes)

    def signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def end(self, deadline: float) -> None:
        """Wait for an interrupted process until the deadline, then kill its group."""
        while self._process.poll() is None and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        self.signal(signal.SIGKILL)
        self._process.wait()


def next_job(waiting: Sequence[Job], running: Sequence[Job], passed: set[str], at_once: int) -> Job | None:
    """Return the job to start now, or None: those that run alone come first, then the longest.

    A job that runs alone is started before those that are ready with it, so that no core idles while it waits.
    """
    ready = [job for job in waiting if job.after <= passed]
    if not ready or len(running) >= at_once or any(job.alone for job in running):
        return None
    best = max(ready, key=lambda job: (job.alone, job.seconds))
    return None if best.alone and running else best


def _elsewhere(jobs: Sequence[Job]) -> set[str]:
    """Return the names that jobs come after but that are not among them, which count as passed."""
    return {name for job in jobs for name in job.after} - {job.name for job in jobs}


def expected_seconds(jobs: Sequence[Job], at_once: int) -> float:
    """Return how long the jobs take if each takes as long as is expected of it."""
    waiting, passed, now = list(jobs), _elsewhere(jobs), 0.0
    running: list[tuple[float, Job]] = []
    while waiting or running:
        while (job := next_job(waiting, [job for _, job in running], passed, at_once)) is not None:
            waiting.remove(job)
            running.append((now + job.seconds, job))
        now, ended = min(running, key=lambda entry: entry[0])
        running.remove((now, ended))
        passed.add(ended.name)
    return now


def run(
    jobs: Sequence[Job],
    at_once: int,
    folder: Path,
    logs: Path,
    on_end: Callable[[Finished], None],
    on_progress: Callable[[list[Job]], None],
) -> None:
    """Run the jobs in `folder`, with the output of each in `logs`/NAME.log.

    `on_end` is called for each job when it ends or is left out, and `on_progress` from time to time with those that
    run.
    """
    waiting, running = list(jobs), list[_Running]()
    passed, failed = _elsewhere(jobs), set[str]()
    next_sample = 0.0
    try:
        while waiting or running:
            while (job := next_job(waiting, [entry.job for entry in running], passed, at_once)) is not None:
                waiting.remove(job)
                running.append(_Running(job, folder, logs / f"{job.name}.log"))
            time.sleep(POLL_SECONDS)
            if time.monotonic() >= next_sample:
                next_sample = time.monotonic() + SAMPLE_SECONDS
                for entry in running:
                    entry.sample()
                on_progress([entry.job for entry in running])
            for entry in list(running):
                if (finished := entry.finished()) is not None:
                    running.remove(entry)
                    (failed if finished.exit_code else passed).add(finished.job.name)
                    on_end(finished)
            while (job := next((job for job in waiting if job.after & failed), None)) is not None:
                waiting.remove(job)
                failed.add(job.name)
                on_end(Finished(job, None))
    except BaseException:
        for entry in running:
            entry.signal(signal.SIGINT)
        deadline = time.monotonic() + LAST_SECONDS
        for entry in running:
            entry.end(deadline)
        raise
