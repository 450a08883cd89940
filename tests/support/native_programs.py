"""Builds the C++ programs of tests/native in the variant under test."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

from builds import BUILD
from places import DATA, NATIVE, SCRIPTS

sys.path.append(str(SCRIPTS))

import native_build  # noqa: E402
import sanitizers  # noqa: E402

VARIANT = native_build.VARIANTS[BUILD]
FOLDER = native_build.objects_folder(VARIANT)


@cache
def build_planted() -> Path:
    """Build the program with the planted bugs."""
    target = FOLDER / "tests" / "planted"
    native_build.build_program(VARIANT, [NATIVE / "planted" / "main.cpp"], target)
    return target


@cache
def build_protocol() -> Path:
    """Build the program that runs parts of the protocol without Python."""
    target = FOLDER / "tests" / "protocol"
    native_build.build_program(VARIANT, sorted((NATIVE / "protocol").glob("*.cpp")), target)
    return target


def run(*command: str | Path, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """Run a program, which links its own sanitizer: nothing is preloaded, and leaks count."""
    environment = {**os.environ, **sanitizers.environment(VARIANT), "LD_PRELOAD": "", "ASAN_OPTIONS": ""}
    if "TSAN_OPTIONS" in environment:
        environment["TSAN_OPTIONS"] += ":atexit_sleep_ms=0"  # all threads have finished by then
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)


def sources_of(*folders: str) -> list[Path]:
    """Return the sources in these folders of csrc/."""
    return [path for folder in folders for path in sorted((native_build.SOURCE_ROOT / folder).glob("*.cpp"))]


@cache
def build_selftest() -> ModuleType:
    """Build a Python module with the executor and a few tiny kernels, separate from the library's extension."""
    bindings = native_build.SOURCE_ROOT / "python" / "bind_executor.cpp"
    executor = sources_of("observe", "sim/executor")
    target = FOLDER / "tests" / f"selftest{native_build.extension_suffix()}"
    native_build.build_module(VARIANT, [*executor, bindings, *sorted((NATIVE / "selftest").glob("*.cpp"))], target)
    spec = importlib.util.spec_from_file_location("selftest", target)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build_portable(folder: Path) -> list[str]:
    """Build the planted program without assembly: with the C library's context switches, and warps of 4 lanes."""
    compiler, _ = native_build.find_compiler(VARIANT)
    return [str(_build_whole(folder, compiler, "-DDEEP_EP_UCONTEXT=1"))]


def build_aarch64(folder: Path) -> list[str]:
    """Build the planted program for another processor. Returns the command; skips the test where a tool is missing."""
    compiler, emulator = "aarch64-linux-gnu-g++", "qemu-aarch64"
    for tool in (compiler, emulator):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed (Debian: g++-aarch64-linux-gnu, qemu-user)")
    return [emulator, str(_build_whole(folder, [compiler], "-static"))]


def build_for_large_pages(folder: Path) -> list[str]:
    """Build the planted program for pages of 64 KiB."""
    compiler, _ = native_build.find_compiler(VARIANT)
    wraps = [f"-Wl,--wrap={function}" for function in ("sysconf", "mmap", "mprotect", "madvise")]
    return [str(_build_whole(folder, [*compiler, *wraps], "-g1", NATIVE / "large_pages.cpp"))]


def _build_whole(folder: Path, compiler: list[str], flag: str, *more: Path) -> Path:
    executor = sources_of("observe", "sim/executor")
    everything = folder / "everything.cpp"
    sources = (*more, *executor, NATIVE / "planted" / "main.cpp")
    everything.write_text("".join(f'#include "{path}"\n' for path in sources))
    target = folder / "planted"
    flags = ("-O1", "-DDEEP_EP_WARP=4", flag, f"-I{native_build.SOURCE_ROOT}")
    command = [*compiler, *native_build.COMMON_FLAGS, *flags, str(everything), "-o", str(target)]
    subprocess.run(command, check=True)
    return target


def build_driver_double(runs_kernels: bool) -> Path:
    """Build the stand-in for libcuda.so.1, with or without an executor of its own to run kernels, and the one for
    libnvidia-ml.so.1.

    Returns their folder, for LD_LIBRARY_PATH."""
    double, root = NATIVE / "driver_double", native_build.SOURCE_ROOT
    sources = [double / name for name in ("libcuda.cpp", "launches.cpp", "memory.cpp", "globals.cpp")]
    if runs_kernels:
        sources += [double / name for name in ("execute_kernels.cpp", "interpret.cpp")]
        sources.append(root / "sim" / "host" / "kernel_table.cpp")
        interpreter = (f"sim/ptx{folder}" for folder in ("", "/order", "/count", "/time"))
        sources += sources_of("observe", "sim/executor", "sim/vector", *interpreter)
    else:
        sources.append(double / "execute_none.cpp")
    variant = native_build.VARIANTS["exact"]  # warps of 32 lanes, and no sanitizer's runtime to preload
    name = "driver_double" if runs_kernels else "idle_driver_double"
    folder = native_build.objects_folder(variant) / "tests" / name
    link = ("-Wl,-soname,libcuda.so.1", "-Wl,-Bsymbolic")
    native_build.build_module(variant, sources, folder / "libcuda.so.1", link)
    link = ("-Wl,-soname,libnvidia-ml.so.1",)
    native_build.build_module(variant, [double / "nvml.cpp"], folder / "libnvidia-ml.so.1", link)
    return folder


@cache
def build_nvshmem_double(creates_queue_pairs: bool) -> Path:
    """Build the stand-in for libnvshmem_host.so.3.

    Returns its folder, for LD_LIBRARY_PATH, which must also name the driver's. Depending on `creates_queue_pairs`, it
    can act as every release that has nvshmemx_qp_create, or as every older one; `NVSHMEM_DOUBLE_VERSION` selects the
    release.
    """
    double, soname = NATIVE / "nvshmem_double", "libnvshmem_host.so.3"
    sources = [*sorted(double.glob("*.cpp")), *sources_of("sim/nic", "observe")]
    if creates_queue_pairs:
        sources += sorted((double / "from_3_5").glob("*.cpp"))
    name = "nvshmem_double" if creates_queue_pairs else "nvshmem_double_before_3.5"
    variant = native_build.VARIANTS["fast"]  # whose objects of the NIC are shared
    folder = native_build.objects_folder(variant) / "tests" / name
    native_build.build_module(variant, sources, folder / soname, (f"-Wl,-soname,{soname}", "-Wl,-Bsymbolic"))
    return folder


class NvshmemDoubles:
    """The stand-ins for NVSHMEM's host library, built on demand."""

    def folder(self, version: str) -> Path:
        """Return the folder of a release, for LD_LIBRARY_PATH."""
        return build_nvshmem_double(tuple(map(int, version.split("."))) >= (3, 5))

    def environment(self, driver: Path, version: str, meeting: Path, **variables: str) -> dict[str, str]:
        """Return the environment of processes over the stand-ins for this release and for the driver, which meet in
        `meeting`."""
        path = os.pathsep.join(map(str, (driver, self.folder(version))))
        return {
            "LD_LIBRARY_PATH": os.pathsep.join(filter(None, [path, os.environ.get("LD_LIBRARY_PATH", "")])),
            "NVSHMEM_DOUBLE_LAYOUTS": str(DATA / "nvshmem"),
            "NVSHMEM_DOUBLE_VERSION": version,
            "NVSHMEM_DOUBLE_FOLDER": str(meeting),
            **variables,
        }
