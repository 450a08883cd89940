"""The formats that kernels write for a ConnectX, against rdma-core's own header."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from native_programs import NATIVE, native_build

pytestmark = pytest.mark.once

HEADER = Path("/usr/include/infiniband/mlx5dv.h")


@pytest.mark.skipif(not HEADER.exists(), reason="needs rdma-core's headers (Debian: libibverbs-dev)")
def test_requests_are_those_of_rdma_core(tmp_path: Path) -> None:
    program = tmp_path / "mlx5_header"
    include = f"-I{native_build.SOURCE_ROOT}"
    source = str(NATIVE / "mlx5_header.cpp")
    # The enumerators of the header have types that cannot be compared with ours.
    command = ["g++", "-std=c++20", "-O1", "-Wno-enum-compare", include, source, "-o", str(program)]
    subprocess.run(command, check=True)
    done = subprocess.run([program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "equal\n"), done.stdout
