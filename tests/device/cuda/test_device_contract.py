"""The functions that a kernel may call: the CPU has them all (for GPUs see test_compile.py), and all are in csrc."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

import native_build
from deep_ep_py.base.sources import include_root
from places import DATA

pytestmark = pytest.mark.once


@pytest.mark.parametrize("warp", [("-DDEEP_EP_WARP=1",), ("-DDEEP_EP_WARP=32", "-DDEEP_EP_COPY_PER_LANE=1")])
def test_device_contract_compiles_for_cpus(warp: tuple[str, ...], tmp_path: Path) -> None:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ is not installed")
    source = tmp_path / "contract.cpp"
    source.write_text(
        '#include "device_contract.h"\n'
        "template void deep_ep::test::contract<deep_ep::StaticShape<8, 14336, 8>>(const deep_ep::test::ContractArgs);\n"
    )
    flags = [*native_build.COMMON_FLAGS, "-fsyntax-only", *(f"-I{path}" for path in (include_root(), DATA))]
    result = subprocess.run([compiler, *flags, *warp, str(source)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_device_code_includes_only_csrc() -> None:
    root = include_root()
    files = [path for part in ("wire", "device", "fabric", "kernels") for path in sorted((root / part).rglob("*.h"))]
    for path in files:
        for name in re.findall(r"^\s*#\s*include\s+(\S+)", path.read_text(), flags=re.MULTILINE):
            if name == "DEEP_EP_DEVICE_BODY":
                continue  # device/cuda/body.h, unless a build names another
            assert name.startswith('"') and (root / name.strip('"')).is_file(), f"{path} includes {name}"
