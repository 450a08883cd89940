"""NVSHMEM's own host library, as far as it works without a GPU. Its wheels have some hundred MB, so it is taken from
the folder that DEEP_EP_NVSHMEM_WHEELS names, to which `scripts/nvshmem_layouts.py --wheels FOLDER` has downloaded them.
"""

from __future__ import annotations

import importlib.util
import os
import re
import zipfile
from pathlib import Path

import pytest

from launches import forked

FOLDER = os.environ.get("DEEP_EP_NVSHMEM_WHEELS", "")
WHEELS = sorted(Path(FOLDER).glob("nvidia_nvshmem*.whl")) if FOLDER else []

pytestmark = [
    pytest.mark.once,
    pytest.mark.skipif(not WHEELS, reason="no wheels of NVSHMEM in DEEP_EP_NVSHMEM_WHEELS"),
    pytest.mark.skipif(importlib.util.find_spec("nvshmem") is None, reason="no nvshmem4py (`make venv` installs it)"),
]


@pytest.mark.parametrize("wheel", WHEELS, ids=lambda wheel: wheel.name.split("-")[1])
def test_it_bootstraps_and_finds_no_gpu(
    wheel: Path, workers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes meet through its unique id. After that, 3.4 continues without a GPU; later releases do not."""
    with zipfile.ZipFile(wheel) as archive:
        libraries = [name for name in archive.namelist() if re.search(r"/lib/[^/]+\.so", name)]
        archive.extractall(tmp_path, libraries)
    monkeypatch.setenv("LD_LIBRARY_PATH", str((tmp_path / libraries[0]).parent))
    done = forked(workers / "nvshmem_without_gpu.py", 2)
    said = [line for line in done.stdout.splitlines() if line.startswith("status ")]
    version = wheel.name.split("-")[1]
    assert len(said) == 2, done.stdout + done.stderr
    if version.startswith("3.4."):
        assert all(f"status 1: NVSHMEM {version} takes no GPU" in line for line in said), said
    else:
        for line in said:
            assert re.match(
                rf"status [01]: NVSHMEM {version}: initializing it as PE [01] of 2 fails \(status 7", line
            ), said
