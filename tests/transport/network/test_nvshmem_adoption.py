"""The adoption of NVSHMEM's queue pairs and keys, from states in the layout of each known release."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from native_programs import native_build, run
from places import CSRC, DATA, NATIVE

pytestmark = pytest.mark.once

GOLDEN = sorted((DATA / "nvshmem").glob("*.json"))
ADOPTION = sorted((CSRC / "host" / "nvshmem").glob("*.cpp"))
# The program reads tables by address, and a wrong address must show.
CHECKED = ("-O0", "-g1", "-fsanitize=address,undefined")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("adoption") / "nvshmem_adoption"
    compiler, _ = native_build.find_compiler(native_build.VARIANTS["fast"])
    sources = [str(path) for path in (NATIVE / "nvshmem_adoption.cpp", *ADOPTION)]
    flags = [*native_build.COMMON_FLAGS, *CHECKED, f"-I{CSRC}", f"-I{NATIVE}"]
    subprocess.run([*compiler, *flags, *sources, "-o", str(target)], check=True)
    return target


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda path: path.stem)
def test_queue_pairs_and_keys_are_adopted_or_refused(program: Path, golden: Path) -> None:
    done = run(program, golden)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith(" cases, 0 wrong\n")
