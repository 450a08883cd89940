"""Runs experiments one by one, and keeps the result of each as soon as there is one."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.gpu_lab.experiments import JSON, ROOT, Experiment, environment_of
from benchmarks.gpu_lab.machine import Machine

PASSED, FAILED, TOO_SLOW, SKIPPED = "passed", "failed", "too slow", "skipped"
LAUNCH_VARIABLE = "DEEP_EP_LAUNCH"
_TAIL_LINES = 25
_LAST_SECONDS = 2  # of a limit: for an experiment that is interrupted to end by itself
_MARK = "DEEP_EP_GPU_LAB"  # in the environment of everything that an experiment starts

Result = dict[str, Any]


def start_process(command: list[str], environment: dict[str, str], log: Any) -> subprocess.Popen[bytes]:
    """Start a command in the project's folder, as the leader of a process group; its output goes to a file."""
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
    )


class Runner:
    """Runs experiments on a machine.

    Parameters
    ----------
    machine
        The machine, and the sources.
    folder
        Where results and outputs are kept.
    console
        Where progress is shown.
    """

    def __init__(self, machine: Machine, folder: Path, console: Console) -> None:
        self._machine, self._folder, self._console = machine, folder, console

    def result_of(self, name: str) -> Result | None:
        """Return the result of an experiment with these sources on such a machine, if there is one."""
        result = _read(self._result_file(name))
        return result if result is not None and self._machine.belongs_to(result) else None

    def kept(self, name: str) -> Result | None:
        """Return the same, unless it says that the experiment was skipped: the reason may have gone."""
        result = self.result_of(name)
        return None if result is None or result["result"] == SKIPPED else result

    def run(self, experiment: Experiment) -> Result:
        """Run an experiment, and keep its result."""
        self._console.rule(f"[bold]{experiment.name}")
        why = self._why_not(experiment)
        if why is not None:
            self._console.print(f"[yellow]skipped: {why}")
            return self._keep(experiment, SKIPPED, note=why)
        self._result_file(experiment.name).unlink(missing_ok=True)
        figures = self._folder / f"{experiment.name}.figures.json"
        figures.unlink(missing_ok=True)
        log = self._folder / f"{experiment.name}.log"
        began = time.monotonic()
        result, note = self._watch(experiment, figures, log)
        seconds = time.monotonic() - began
        lines = log.read_text(errors="replace").splitlines()
        shown = lines[-(_TAIL_LINES if result == PASSED else 3 * _TAIL_LINES) :]
        self._console.print("\n".join(shown), markup=False)
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        tail = {} if result == PASSED else {"tail": lines[-_TAIL_LINES:]}
        return self._keep(experiment, result, seconds, note or last[:100], figures=_read(figures), **tail)

    def _why_not(self, experiment: Experiment) -> str | None:
        if experiment.needs is not None and shutil.which(experiment.needs) is None:
            return f"there is no {experiment.needs}"
        if experiment.gpus > self._machine.gpus:
            return f"needs {experiment.gpus} GPUs, there is one"
        canary = (self.kept("canary") or {}).get("figures") or {}
        if experiment.shares and "side_by_side" in canary and canary["launch"] is None:
            return "ranks cannot share this GPU: see the canary"
        return None

    def _environment(self, experiment: Experiment) -> dict[str, str]:
        """Return the environment; how to launch is what the canary has found, unless that was said."""
        launch = ((self.kept("canary") or {}).get("figures") or {}).get("launch")
        chosen = {} if launch is None or LAUNCH_VARIABLE in os.environ else {LAUNCH_VARIABLE: launch}
        return {**environment_of(experiment), **chosen}

    def _watch(self, experiment: Experiment, figures: Path, log: Path) -> tuple[str, str]:
        """Run the command until it ends or its time is up; then nothing of it remains."""
        command = [part.replace(JSON, str(figures)) for part in experiment.command]
        limit = experiment.seconds
        mark = f"{os.getpid()} {experiment.name} {time.monotonic_ns()}"
        with log.open("w") as file:
            process = start_process(command, {**self._environment(experiment), _MARK: mark}, file)
            try:
                code = process.wait(max(limit / 2, limit - _LAST_SECONDS))
                return (PASSED, "") if code == 0 else (FAILED, f"exit code {code}")
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGINT)  # pytest then reports what has failed so far
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_LAST_SECONDS)
                return TOO_SLOW, f"unfinished after {limit} s"
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                _kill_marked(mark)
                with suppress(subprocess.TimeoutExpired):  # what the driver holds in the kernel cannot be killed
                    process.wait(_LAST_SECONDS)

    def _keep(self, experiment: Experiment, result: str, seconds: float = 0.0, note: str = "", **more: Any) -> Result:
        kept = {
            "name": experiment.name,
            "question": experiment.question,
            "result": result,
            "seconds": round(seconds, 1),
            "limit": experiment.seconds,
            "note": note,
            **asdict(self._machine),
            **more,
        }
        file = self._result_file(experiment.name)
        partial = file.with_suffix(".partial")
        partial.write_text(json.dumps(kept, indent=2) + "\n")
        partial.replace(file)
        return kept

    def _result_file(self, name: str) -> Path:
        return self._folder / f"{name}.json"


def _kill_marked(mark: str) -> None:
    """Kill what is left in groups of its own, as torchrun's ranks are: it would keep using the GPU."""
    wanted = f"{_MARK}={mark}".encode()
    for process in Path("/proc").iterdir():
        if process.name.isdecimal():
            with suppress(OSError):  # it has ended, or belongs to another user
                if wanted in (process / "environ").read_bytes().split(b"\0"):
                    os.kill(int(process.name), signal.SIGKILL)


def _read(file: Path) -> Any:
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError):
        return None
