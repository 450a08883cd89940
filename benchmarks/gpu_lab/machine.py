"""The machine and the sources that results belong to."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from benchmarks.gpu_lab.experiments import ROOT

_SECONDS = 20
_SOURCES = ("benchmarks/gpu_lab", "csrc", "deep_ep_py", "tests/device/gpu", "tests/support")
_SUFFIXES = (".cpp", ".cu", ".h", ".py")


@dataclass(frozen=True)
class Machine:
    """What every result is kept with.

    Parameters
    ----------
    gpu, driver
        Name of the first GPU, and release of its driver.
    gpus
        Number of GPUs.
    commit
        The commit, with a hash of the sources if they differ from it; in a folder without history the hash alone.
    date
        When this run began.
    python, torch, kernel, cores
        Versions, and number of cores.
    """

    gpu: str
    driver: str
    gpus: int
    commit: str
    date: str
    python: str
    torch: str
    kernel: str
    cores: int

    def belongs_to(self, result: dict[str, object]) -> bool:
        """Return whether a result is from these sources on such a machine."""
        own = asdict(self)
        return all(result.get(key) == own[key] for key in ("gpu", "driver", "gpus", "commit"))


def describe() -> Machine | None:
    """Describe this machine; None if it has no GPU, or no nvidia-smi to say so."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    lines = [line for line in (_output(query) or "").splitlines() if line.strip()]
    if not lines:
        return None
    name, _, driver = lines[0].partition(",")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return Machine(
        gpu=name.strip(),
        driver=driver.strip(),
        gpus=len(lines) if visible is None else len([one for one in visible.split(",") if one.strip()]),
        commit=identify(ROOT),
        date=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        python=platform.python_version(),
        torch=_torch(),
        kernel=platform.release(),
        cores=len(os.sched_getaffinity(0)),
    )


def identify(folder: Path) -> str:
    """Name the sources in a folder."""
    commit = (
        _output(["git", "-C", str(folder), "rev-parse", "--short=12", "HEAD"]) if (folder / ".git").exists() else None
    )
    if commit is None:
        return f"files {hash_of(folder)}"
    changed = _output(["git", "-C", str(folder), "status", "--porcelain"])
    return f"{commit}+{hash_of(folder)}" if changed else commit


def hash_of(folder: Path) -> str:
    """Hash the sources that results depend on."""
    digest = hashlib.sha256()
    for part in _SOURCES:
        for path in sorted((folder / part).rglob("*")):
            if path.suffix in _SUFFIXES:
                digest.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def _torch() -> str:
    """Return torch's version without importing it, which takes seconds."""
    try:
        return version("torch")
    except PackageNotFoundError:
        return "unknown"


def _output(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_SECONDS)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
