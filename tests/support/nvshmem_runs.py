"""Workers over the stand-ins for the driver and for NVSHMEM's host library."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from launches import torchrun
from native_programs import NvshmemDoubles
from places import WORKERS


@dataclass
class Nvshmem:
    """Where the stand-ins are, and what the environment tells them."""

    driver: Path
    doubles: NvshmemDoubles
    probe: Path
    folder: Path
    monkeypatch: pytest.MonkeyPatch

    def run(
        self, worker: str, ranks: int, *arguments: str, version: str = "3.4.5", **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a worker on so many processes over a release of NVSHMEM."""
        paths = [str(self.driver), str(self.doubles.folder(version)), os.environ.get("LD_LIBRARY_PATH", "")]
        given = {
            "LD_LIBRARY_PATH": os.pathsep.join(path for path in paths if path),
            "PROBE_CUBIN": str(self.probe),
            "DOUBLE_LOG": str(self.folder / "log"),
            "NVSHMEM_DOUBLE_FOLDER": str(self.folder),
            "NVSHMEM_DOUBLE_VERSION": version,
            **environment,
        }
        with self.monkeypatch.context() as patch:
            for name, value in given.items():
                patch.setenv(name, value)
            return torchrun(WORKERS / worker, ranks, *arguments)
