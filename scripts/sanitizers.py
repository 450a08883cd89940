"""The environment in which Python must start to load a variant of the extension.

Run as a script, it prints the environment: `env $(python scripts/sanitizers.py tsan) python -m pytest tests/...`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import native_build
import toolchain

# CPython and torch free little at exit, so leak reports mean nothing here.
ASAN_OPTIONS = "detect_leaks=0"
UBSAN_OPTIONS = "halt_on_error=1:print_stacktrace=1"
TSAN_OPTIONS = f"exitcode=66:suppressions={Path(__file__).parent / 'tsan_suppressions.txt'}"


def _file_of(compiler: list[str], name: str) -> str:
    path = subprocess.check_output([*compiler, f"-print-file-name={name}"], text=True).strip()
    if not Path(path).is_absolute():
        raise toolchain.BuildError(f"{compiler[0]} has no {name}")
    return path


def _with_user_options(name: str, ours: str) -> dict[str, str]:
    theirs = os.environ.get(name)
    return {name: f"{ours}:{theirs}" if theirs else ours}


def environment(variant: native_build.Variant) -> dict[str, str]:
    """Return the variables to set, in addition to the current ones, before Python starts."""
    result = {"DEEP_EP_BUILD": variant.name}
    if variant.name == "asan":
        # libstdc++ too: ASan looks up __cxa_throw at startup, and Python does not load it.
        gcc = toolchain.find_gcc()
        result["LD_PRELOAD"] = f"{_file_of(gcc, 'libasan.so')}:{_file_of(gcc, 'libstdc++.so.6')}"
        result |= _with_user_options("ASAN_OPTIONS", ASAN_OPTIONS)
        result |= _with_user_options("UBSAN_OPTIONS", UBSAN_OPTIONS)
    elif variant.name == "tsan":
        clang = native_build.find_clang()
        symbolizer = f":external_symbolizer_path={clang.symbolizer}" if clang.symbolizer else ""
        result["LD_PRELOAD"] = str(clang.runtime)
        result |= _with_user_options("TSAN_OPTIONS", TSAN_OPTIONS + symbolizer)
    return result


if __name__ == "__main__":
    for name, value in environment(native_build.VARIANTS[sys.argv[1]]).items():
        print(f"{name}={value}")
