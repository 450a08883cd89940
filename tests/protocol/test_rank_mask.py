"""Sets of ranks, with the compile-time checks of tests/native/rank_mask.cpp."""

from __future__ import annotations

import subprocess

import pytest

from native_programs import native_build
from places import CSRC, NATIVE

pytestmark = pytest.mark.once


def test_it_compiles() -> None:
    compiler, _ = native_build.find_compiler(native_build.VARIANTS["fast"])
    command = [*compiler, "-std=c++17", "-fsyntax-only", "-Werror", f"-I{CSRC}", str(NATIVE / "rank_mask.cpp")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
