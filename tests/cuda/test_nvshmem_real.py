"""NVSHMEM's own host library, as far as it goes without a GPU. Its wheels have some hundred MB, so it is looked for
where DEEP_EP_NVSHMEM_WHEELS says, a folder of wheels that `scripts/nvshmem_layouts.py --wheels FOLDER` has downloaded.
"""

from __future__ import annotations

import importlib.util
import os
import re
import zipfile
from pathlib import Path

import pytest

from launches import torchrun

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
    """Two processes meet by its unique id. Then 3.4 goes on without a GPU, and later releases do not."""
    with zipfile.ZipFile(wheel) as archive:
        libraries = [name for name in archive.namelist() if re.search(r"/lib/[^/]+\.so", name)]
        archive.extractall(tmp_path, libraries)
    monkeypatch.setenv("LD_LIBRARY_PATH", str((tmp_path / libraries[0]).parent))
    done = torchrun(workers / "nvshmem_without_gpu.py", 2)
    said = [line for line in done.stdout.splitlines() if line.startswith("status ")]
    version = wheel.name.split("-")[1]
    assert len(said) == 2, done.stdout + done.stderr
    if version.startswith("3.4."):
        assert all(f"status 1: NVSHMEM {version} takes no GPU" in line for line in said), said
    else:
        for line in said:
            assert re.match(
                rf"status [01]: NVSHMEM {version}: initialising it as PE [01] of 2 fails \(status 7", line
            ), said
