"""When unused memory goes back to the system: the policy by itself, with the program tests/native/idle_pieces.cpp."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from native_programs import native_build
from places import CSRC, NATIVE

pytestmark = pytest.mark.once


def test_the_policy(tmp_path: Path) -> None:
    compiler, _ = native_build.find_compiler(native_build.VARIANTS["fast"])
    sources = [str(NATIVE / "idle_pieces.cpp"), str(CSRC / "host" / "heap" / "idle_pieces.cpp")]
    program = tmp_path / "idle_pieces"
    subprocess.run([*compiler, *native_build.COMMON_FLAGS, f"-I{CSRC}", *sources, "-o", str(program)], check=True)
    done = subprocess.run([program], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
