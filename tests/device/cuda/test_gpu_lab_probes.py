"""The probes of `make gpu-lab`, which only a GPU runs: they compile, and the change that one applies is possible."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.gpu_lab import combine_fence, fences, probe, ring
from deep_ep_py.base.sources import include_root
from deep_ep_py.device.jit import KERNELS, CompiledKernel, NvrtcUnavailableError, Shape, compile_kernel, require_nvrtc
from places import ROOT

pytestmark = pytest.mark.once

KERNELS_OF = {
    "abort_word.cu": ["change_word"],
    "cold_code.cu": ["cold_code"],
    "empty.cu": ["empty"],
    "fences.cu": [
        *(f"fence<gpu_lab::{kind}>" for kind in fences.FENCES.values()),
        *(f"addition<gpu_lab::{kind}>" for kind in fences.ADDITIONS.values()),
        *("dependent_loads", "bulk_loads<>"),
    ],
    "memory.cu": ["spread"],
    "ring.cu": [f"ring<{ahead}>" for ahead in ring.AHEAD],
}
CODE_BYTES = 256 << 10
"""What the kernel of large code must have at least."""


@pytest.fixture(autouse=True)
def nvrtc() -> None:
    try:
        require_nvrtc()
    except NvrtcUnavailableError as error:
        pytest.skip(str(error))


def test_all_sources_are_named() -> None:
    assert {path.name for path in probe.FOLDER.glob("*.cu")} == set(KERNELS_OF)


def compiled(source: str, name: str, architecture: str = "sm_90a") -> CompiledKernel:
    gpu: Any = SimpleNamespace(architecture=architecture)
    return probe.compiled(source, f"gpu_lab::{name}", gpu)


def test_a_gpu_without_bulk_copies_compiles_the_rest() -> None:
    assert compiled("fences.cu", "dependent_loads", "sm_80").cubin


@pytest.mark.parametrize("source", KERNELS_OF)
@pytest.mark.thorough
def test_probes_compile(source: str) -> None:
    for name in KERNELS_OF[source]:
        code = compiled(source, name)
        assert code.symbol.startswith("_ZN7gpu_lab"), "the stand-in for the driver knows them by it"
        assert not code.resources.spill_stores
        assert len(code.cubin) > (CODE_BYTES if name == "cold_code" else 0)


def test_the_change_to_combine_applies_once(tmp_path: Path) -> None:
    """To today's sources; and what it makes of them compiles."""
    text = (ROOT / combine_fence.HEADER).read_text()
    changed = combine_fence.patch(text)
    lines = [(old, new) for old, new in zip(text.splitlines(), changed.splitlines(), strict=True) if old != new]
    ((old, new),) = lines
    assert "fence_shared" in old and "fence.proxy.async;" in new
    for wrong in (changed, text + text):
        with pytest.raises(ValueError, match="row_sums_bulk.h: expected once: bulk::fence_shared"):
            combine_fence.patch(wrong)
    shutil.copytree(include_root(), tmp_path / "csrc")
    (tmp_path / combine_fence.HEADER).write_text(changed)
    code = compile_kernel(KERNELS["combine"], Shape(8, 2 * 7168, 0), "sm_90a", (tmp_path / "csrc",))
    assert not code.resources.spill_stores
