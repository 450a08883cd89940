"""The requirements of a new fabric: a header for kernels, a network for the host, a line in the registry."""

from __future__ import annotations

from dataclasses import replace

import pytest

from builds import LONG
from native_programs import FOLDER, native_build, run
from places import NATIVE, ROOT

pytestmark = [
    pytest.mark.once,
    pytest.mark.long,
    pytest.mark.skipif(not LONG, reason="compiles all sources: `make test-long` runs it"),
]


def test_normal_mode_over_a_fabric_of_its_own() -> None:
    """Its registry header is first on the include path."""
    toy = NATIVE / "toy"
    fast = native_build.VARIANTS["fast"]
    flags = (f"-I{toy.relative_to(ROOT)}", "-DDEEP_EP_WARP=1", "-O1", "-g0")
    variant = replace(fast, name="toy", flags=flags)
    program = FOLDER.parent / "toy" / "toy"
    native_build.build_program(variant, [toy / "main.cpp"], program)
    for seed in range(4):
        done = run(program, str(seed))
        assert done.returncode == 0, done.stderr
        puts = int(done.stdout.split()[0])
        assert puts > 100, "rows have taken another path"
