"""Buffers whose heaps lie in NVSHMEM's and whose kernels post to its queue pairs, over the stand-ins for its host library
and for the driver.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from builds import LONG
from deep_ep_py.jit import NvrtcUnavailableError, require_nvrtc
from deep_ep_py.nvshmem import probe
from native_programs import build_nvshmem_double
from nvshmem_runs import Nvshmem

pytestmark = [
    pytest.mark.once,
    pytest.mark.skipif(importlib.util.find_spec("nvshmem") is None, reason="no nvshmem4py (`make venv` installs it)"),
]
IN_LONG = pytest.mark.skipif(not LONG, reason="as the others: in `make test-long`")

SHARED, OWN = "3.4.5", "3.8.0"
"""The release that shares its queue pairs, and the newest, which makes others."""


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {version: build_nvshmem_double(tmp_path_factory.mktemp("nvshmem"), version) for version in (SHARED, OWN)}


@pytest.fixture(scope="module")
def compiled_probe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """NVRTC looks for the driver, and must not find the stand-in."""
    try:
        require_nvrtc()
    except NvrtcUnavailableError as error:
        pytest.skip(str(error))
    path = tmp_path_factory.mktemp("probe") / "probe.cubin"
    path.write_bytes(probe._cubin("sm_90a"))
    return path


@pytest.fixture
def nvshmem(
    double: Path,
    libraries: dict[str, Path],
    compiled_probe: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Nvshmem:
    return Nvshmem(double, libraries, compiled_probe, tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("version", "ranks", "per_node", "options"),
    [
        (SHARED, 4, (1, 2, 4), ("--foreign",)),
        (OWN, 4, (1, 2), ("--foreign",)),
        (OWN, 8, (4,), ()),
        pytest.param(SHARED, 8, (1, 2, 4), ("--foreign",), marks=IN_LONG),
        pytest.param(OWN, 2, (1, 2), ("--foreign",), marks=IN_LONG),
        pytest.param("3.5.21", 4, (1, 2), ("--foreign",), marks=IN_LONG),
        pytest.param("3.6.5", 4, (1, 2), ("--foreign",), marks=IN_LONG),
        pytest.param("3.7.2", 4, (1, 2), ("--foreign",), marks=IN_LONG),
    ],
)
def test_both_modes(
    nvshmem: Nvshmem, version: str, ranks: int, per_node: tuple[int, ...], options: tuple[str, ...]
) -> None:
    nodes = [f"--ranks-per-node={count}" for count in per_node]
    done = nvshmem.run("nvshmem_buffers.py", ranks, *nodes, *options, version=version)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(("version", "nics"), [(SHARED, 2), (OWN, 2)])
def test_several_nics_and_small_rings(nvshmem: Nvshmem, version: str, nics: int) -> None:
    """Chunks of keys that end within the heap, rings that are full, data that overtakes data."""
    done = nvshmem.run(
        "nvshmem_buffers.py",
        4,
        "--ranks-per-node=2",
        "--foreign",
        version=version,
        NVSHMEM_DOUBLE_NICS=str(nics),
        NVSHMEM_QP_DEPTH="128",
        NVSHMEM_DOUBLE_CHUNK_LOG2="16",
        NVSHMEM_DOUBLE_NIC_RELAXED="1",
    )
    assert done.returncode == 0, done.stdout + done.stderr
