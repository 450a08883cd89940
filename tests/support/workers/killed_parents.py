"""Kills benchmarks at random moments, and looks for what their ranks have left behind; a line of JSON for each.

The benchmark runs in a fork that has imported it, so that most of its time is spent in its ranks. A marker in the
environment, inherited by all processes started from then on, distinguishes the ranks from other processes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import time
import uuid
from pathlib import Path
from typing import Any

import torch

from deep_ep_py.tools.bench import cli

RANKS = 2
OPTIONS = [f"--ranks={RANKS}", "--hidden=64", "--experts=12", "--topk=4", "--tokens=32", "--iterations=300"]
OPTIONS += ["--no-plot", "--baseline=gloo"]
MARKER = "DEEP_EP_TEST_MARKER"
# Delay of the kill after each stage begins, in seconds: starting processes, importing torch, running.
STAGES = {"starting": (0.0, 0.12), "importing": (0.1, 2.5), "running": (0.0, 0.5)}
MAX_SECONDS = 5.0
STARTED_SECONDS = 60


def be_a_benchmark(running: int, marker: str, folder: Path) -> None:
    """In a fork: measure until killed; report the first event from a rank."""

    class Progress:
        def __init__(self, console: Any) -> None: ...

        def __enter__(self) -> Progress:
            return self

        def __exit__(self, *raised: object) -> None: ...

        def on_event(self, event: dict[str, Any]) -> None:
            if event["kind"] == "step" and event["step"] == 0:
                os.write(running, b"1")

    cli.BenchProgress = Progress  # type: ignore[assignment, misc]
    os.environ[MARKER] = marker
    os.environ["TMPDIR"] = str(folder)
    os.dup2(2, 1)  # what it prints is not a line of JSON
    cli.command.main(OPTIONS)


def marked(marker: str) -> list[int]:
    """Return the live processes with the marker."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                environment = (folder / "environ").read_bytes()
            except OSError:  # ended, or another user's
                continue
            if f"{MARKER}={marker}".encode() in environment.split(b"\0"):
                found.append(int(folder.name))
    return found


def run_trial(random_: random.Random, number: int, folder: Path) -> dict[str, Any]:
    """Start a benchmark, kill it, and wait until its ranks have ended."""
    stage = list(STAGES)[number % len(STAGES)]
    moment, marker = random_.uniform(*STAGES[stage]), uuid.uuid4().hex
    temporary = folder / str(number)
    temporary.mkdir()
    reader, writer = os.pipe()
    parent = os.fork()
    if parent == 0:
        os.close(reader)
        try:
            be_a_benchmark(writer, marker, temporary)
        finally:
            os._exit(1)
    os.close(writer)
    if stage == "running":
        signal.alarm(STARTED_SECONDS)
        assert os.read(reader, 1) == b"1", "the benchmark ended on its own"
        signal.alarm(0)
    time.sleep(moment)
    alive = len(marked(marker))
    os.kill(parent, signal.SIGKILL)
    killed = time.monotonic()
    os.waitpid(parent, 0)
    os.close(reader)
    left, gone = marked(marker), None
    while time.monotonic() < killed + MAX_SECONDS:
        if not left:
            gone = time.monotonic() - killed
            break
        time.sleep(0.01)
        left = marked(marker)
    commands = [Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()[:80] for pid in left]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return {
        "stage": stage,
        "moment": round(moment, 4),
        "ranks": alive,
        "gone": None if gone is None else round(gone, 3),
        "left": commands,
        "files": sorted(path.name for path in temporary.iterdir()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=6)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, required=True, help="Empty folder for the benchmarks' temporary files.")
    options = parser.parse_args()
    torch.set_num_threads(1)
    random_ = random.Random(options.seed)
    for number in range(options.kills):
        print(json.dumps(run_trial(random_, number, options.folder)), flush=True)


if __name__ == "__main__":
    main()
