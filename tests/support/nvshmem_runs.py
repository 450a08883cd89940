"""Workers over the stand-ins for the driver and for NVSHMEM's host library."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from deep_ep_py.device.jit import NvrtcUnavailableError, require_nvrtc
from deep_ep_py.transport.nvshmem import probe
from launches import forked
from native_programs import NvshmemDoubles
from places import WORKERS


def compile_probe(path: Path) -> Path:
    """Compile the module that reads NVSHMEM's memory. NVRTC looks for the driver, and must not find the stand-in."""
    try:
        require_nvrtc()
    except NvrtcUnavailableError as error:
        pytest.skip(str(error))
    path.write_bytes(probe._cubin("sm_90a"))
    return path


@dataclass
class Nvshmem:
    """The locations of the stand-ins, and their settings in the environment."""

    driver: Path
    doubles: NvshmemDoubles
    probe: Path
    folder: Path
    monkeypatch: pytest.MonkeyPatch

    def run(
        self, worker: str, ranks: int, *arguments: str, version: str = "3.4.5", **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a worker on so many processes over a release of NVSHMEM."""
        given = {
            **self.doubles.environment(self.driver, version, self.folder),
            "PROBE_CUBIN": str(self.probe),
            "DOUBLE_LOG": str(self.folder / "log"),
            **environment,
        }
        with self.monkeypatch.context() as patch:
            for name, value in given.items():
                patch.setenv(name, value)
            return forked(WORKERS / worker, ranks, *arguments)
