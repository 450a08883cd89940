"""The machine that figures were measured on."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from typing import Any

import torch

from deep_ep_py.base import choices


@cache
def usable_cores() -> list[int]:
    """Return the cores that this process may use, as of the first call, before it pins itself."""
    return sorted(os.sched_getaffinity(0))


def describe_machine() -> dict[str, Any]:
    """Return the processor, the memory and the versions, as far as they can be determined."""
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": _first_value("/proc/cpuinfo", "model name") or platform.processor() or platform.machine(),
        "cores": len(usable_cores()),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "deep_ep_py": _version(),
        "build": os.environ.get("DEEP_EP_BUILD", "fast"),
        "commit": _commit(),
        "choices": choices.all_chosen(),
        **(_gpu() if torch.cuda.is_initialized() else {}),
    }


def _gpu() -> dict[str, Any]:
    from deep_ep_py.base.native import C

    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "gpu": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "gpu_memory_gib": round(properties.total_memory / 2**30, 1),
        "cuda_driver": C.cuda.driver_version(),
        "driver": _kernel_driver(),
    }


def _kernel_driver() -> str | None:
    """Return the release of the GPU's driver in the kernel, such as 580.159.04."""
    try:
        found = re.search(r"\d+(\.\d+)+", Path("/proc/driver/nvidia/version").read_text())
    except OSError:
        return None
    return None if found is None else found[0]


def _version() -> str:
    from deep_ep_py._version import __version__

    return __version__


def _first_value(path: str, key: str) -> str | None:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return None
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(key)), None)


def _commit() -> str | None:
    """Return the checkout's commit, with a + if files differ from it; None outside a checkout."""
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists():
        return None
    try:
        commit = _git(root, "rev-parse", "--short=12", "HEAD")
        return commit + ("+" if _git(root, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=10).stdout.strip()
