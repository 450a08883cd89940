"""Heaps of processes are files in memory, which some systems allow only if they cannot be executed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.once

# What memfd_create(2) does on other systems: since Linux 6.3 with vm.memfd_noexec=2, and before.
STANDINS = {
    "enforcing": "if (!(flags & 8)) { errno = EACCES; return -1; }",
    "older": "if (flags & 8) { errno = EINVAL; return -1; }",
}
PROGRAM = """
import os
from deep_ep_py.base.files import memory_file
from deep_ep_py.base.native import C
os.close(memory_file("test"))
print(C.Heap.make_shared(1 << 20).bytes)
"""


@pytest.mark.parametrize("system", STANDINS)
def test_they_cannot_be_executed_where_that_is_possible(system: str, tmp_path: Path) -> None:
    if (compiler := shutil.which("g++")) is None:
        pytest.skip("g++ is not installed")
    source, library = tmp_path / "memfd.c", tmp_path / "memfd.so"
    source.write_text(
        "#define _GNU_SOURCE\n#include <errno.h>\n#include <sys/syscall.h>\n#include <unistd.h>\n"
        "int memfd_create(const char* name, unsigned flags) {\n"
        f"  {STANDINS[system]}\n  return syscall(SYS_memfd_create, name, flags & ~8u);\n}}\n"
    )
    subprocess.run([compiler, "-xc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    environment = {**os.environ, "LD_PRELOAD": str(library)}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True)
    assert done.stdout == f"{1 << 20}\n", done.stderr
