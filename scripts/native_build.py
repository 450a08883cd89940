"""Compile the variants of the C++ extension with nothing but g++ or clang++. Used by setup.py and scripts/run_tests.py.

Small sources of a folder are compiled together, since most of the time goes into the headers and templates that they
share; names with internal linkage are unique within a folder. An object is rebuilt when one of its sources, a
header that they include (compiler depfiles) or its command line has changed. Headers that most sources include are
precompiled. Results are renamed into place, so that a process that has loaded the old extension keeps it. A lock per
variant makes concurrent builds safe.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import toolchain
from toolchain import BuildError, Clang

ROOT = Path(__file__).resolve().parent.parent
SOURCE_ROOT = ROOT / "csrc"

COMMON_FLAGS = (
    # Kernels access rows as 16-byte vectors whatever the element type; CUDA compilers allow that, so this one must too.
    "-fno-strict-aliasing",
    # Order and rounding of sums must be the same for every instruction set and on GPUs.
    "-ffp-contract=off",
    "-std=c++20",
    "-fPIC",
    "-fvisibility=hidden",
    "-pthread",
    "-Wall",
    "-Wextra",
    "-Werror",
    # The fibers of the executor are the threads of kernels (device/device.h).
    '-DDEEP_EP_DEVICE_BODY="sim/device/body.h"',
    # The sources contain `#pragma unroll` for NVRTC.
    "-Wno-unknown-pragmas",
)
# 32 lanes, and copies made lane by lane so that every schedule of a copy can occur.
EXACT_DEFINES = ("-DDEEP_EP_WARP=32", "-DDEEP_EP_COPY_PER_LANE=1")
# 4 lanes: ThreadSanitizer distinguishes about 250 threads. Beyond that it reuses their slots and forgets their
# accesses: with 384 fibers it missed a barrier that had been removed.
TSAN_DEFINES = ("-DDEEP_EP_WARP=4", "-DDEEP_EP_COPY_PER_LANE=1", "-DDEEP_EP_TSAN=1")
# vptr needs type information that is missing with hidden visibility and in pybind11's own checks. Null pointers are
# AddressSanitizer's as well. The check of alignment takes half of a compilation, and only GPUs fault at what it finds.
UNCHECKED = ("-fno-sanitize=vptr,null,alignment",)
ASAN_FLAGS = ("-DDEEP_EP_ASAN=1", "-fsanitize=address,undefined", *UNCHECKED, "-fno-omit-frame-pointer")
ASAN_KERNEL_FLAGS = ("-fsanitize=alignment",)
# What the threads of kernels run. With the programs of tests, these are all sources that instantiate kernels.
KERNELS = ("sim/host", "sim/vector", "sim/executor")
# Bindings are mostly pybind11 templates: half of the build time, with no loops to optimize and nothing that a checked
# build checks. They do not depend on the variant, so all variants link the same objects, and link them last: of an
# inline function that others use too, the variant's own copy is taken.
BINDINGS = "python"
INTERPRETER, INTERPRETER_BINDINGS = "sim/ptx", "python/ptx"
BINDINGS_FLAGS = ("-O1", "-g1", "-fno-sanitize=all")
# GCC's garbage collection takes a tenth of their compilation, and saves a quarter of its memory.
COLLECT_NOTHING = "--param=ggc-min-heapsize=1000000"
# The host's code runs once per call, the kernels' once per thread. With the checks of UBSan, optimizing takes more than
# half of a compilation.
HOST_FOLDERS = ("host/control", "host/cuda", "host/heap", "host/launch", "host/modes", "host/network", "host/nvshmem")
HOST_FOLDERS += ("host/session", "sim/network", "sim/nic/network")
CHECKED_HOST_FLAGS = ("-O0",)
# ThreadSanitizer ignores accesses of more than 16 bytes, so vectorization could hide races from it.
TSAN_CODE = ("-fno-vectorize", "-fno-slp-vectorize")
# The executor switches the sanitizer's fibers, which instrumented code cannot do.
TSAN_UNINSTRUMENTED = "sim/executor"
# These take half of the compile time of a small source.
STANDARD_HEADERS = (
    *("algorithm", "any", "array", "atomic", "chrono", "condition_variable", "cstdint", "cstring", "deque"),
    *("functional", "map", "memory", "mutex", "optional", "random", "set", "sstream", "stdexcept", "string"),
    *("thread", "utility", "vector"),
)
BINDINGS_HEADERS = ("pybind11/pybind11.h", "pybind11/functional.h", "pybind11/stl.h")
LIBFABRIC_HEADER = "rdma/fabric.h"
# Folders of what kernels include, which is compiled for GPUs where the library is used.
FOR_GPUS = ("device", "fabric", "kernels", "wire")
TEST_NETWORKS = "sim/network/weak"
WITH_LIBFABRIC, WITHOUT_LIBFABRIC = "host/network/proxy/with_libfabric", "host/network/proxy/without_libfabric"
PRECOMPILED_FOR = 4  # units with the same flags; for fewer, precompiling costs more than it saves
# More in a unit would save little, and leave cores idle while the last ones are compiled.
UNIT_BYTES = 32_000
BINDINGS_UNIT_BYTES = 52_000  # each unit of bindings takes 7 s for the templates of pybind11
# Its sources are the same body for several instruction sets.
ALONE = "sim/vector"


@dataclass(frozen=True)
class Variant:
    """One build of the extension, `deep_ep_py/_C_<name>`."""

    name: str
    flags: tuple[str, ...]
    host_flags: tuple[str, ...] = ()
    kernel_flags: tuple[str, ...] = ()
    test_flags: tuple[str, ...] = ()  # for programs of tests
    link_flags: tuple[str, ...] = ()
    instrument: tuple[str, ...] = ()  # for every file except those under `uninstrumented`
    uninstrumented: str = ""
    clang: bool = False
    interprets: bool = False  # contains the interpreter of PTX, whose warps have 32 lanes

    @property
    def module(self) -> str:
        return f"_C_{self.name}"


VARIANTS = {
    v.name: v
    for v in (
        # Beyond -O1 only kernels and copies become faster. Programs of tests would compile longer than they run.
        Variant("fast", ("-O1", "-g1", "-DDEEP_EP_WARP=1"), kernel_flags=("-O3",), test_flags=("-O1",)),
        Variant("exact", ("-O1", "-g1", *EXACT_DEFINES), interprets=True),
        Variant(
            "asan",
            ("-O1", "-g1", *EXACT_DEFINES, *ASAN_FLAGS),
            host_flags=CHECKED_HOST_FLAGS,
            kernel_flags=ASAN_KERNEL_FLAGS,
            link_flags=ASAN_FLAGS,
            interprets=True,
        ),
        Variant(
            "tsan",
            ("-O1", "-g1", "-fno-omit-frame-pointer", "-Wno-pass-failed", *TSAN_CODE, *TSAN_DEFINES),
            host_flags=CHECKED_HOST_FLAGS,
            instrument=("-fsanitize=thread",),
            uninstrumented=TSAN_UNINSTRUMENTED,
            clang=True,
        ),
    )
}


def variants_from_env() -> list[Variant]:
    """Return the variants that `DEEP_EP_BUILDS` names: a comma-separated list, "all" or "none"; "fast" by default."""
    text = os.environ.get("DEEP_EP_BUILDS", "") or "fast"
    sets = {"all": list(VARIANTS), "none": []}
    names = sets[text] if text in sets else [name.strip() for name in text.split(",")]
    unknown = [name for name in names if name not in VARIANTS]
    if unknown:
        raise BuildError(f"DEEP_EP_BUILDS names {unknown}: expected some of {list(VARIANTS)}")
    return [VARIANTS[name] for name in dict.fromkeys(names)]


def find_clang() -> Clang:
    """Return the clang++ of the ThreadSanitizer build; raise BuildError with advice if there is none."""
    clang = toolchain.find_clang(ROOT / "build")
    if clang is None:
        raise BuildError(toolchain.NO_CLANG)
    return clang


def find_compiler(variant: Variant, program: bool = False) -> tuple[list[str], tuple[str, ...]]:
    """Return the command that compiles and links the variant, and the link flags of a module or program."""
    if not variant.clang:
        return toolchain.find_gcc(), variant.link_flags
    clang = find_clang()
    clang.make_runtime()
    flags = variant.instrument if program else clang.module_flags  # a program contains the sanitizer's runtime
    return [*clang.command, *clang.flags], (*flags, *clang.libraries)


@cache
def _accepts(compiler: tuple[str, ...], *flags: str) -> bool:
    asking = [*compiler, "-Werror", *flags, "-fsyntax-only", "-x", "c++", os.devnull]
    return subprocess.run(asking, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0


@dataclass(frozen=True)
class Unit:
    """Sources of one folder that are compiled together: its bindings, or the others."""

    sources: tuple[Path, ...]

    @property
    def folder(self) -> Path:
        return self.sources[0].parent

    @property
    def name(self) -> Path:
        """The path of the unit's object without its suffix, relative to the folder of objects."""
        if len(self.sources) == 1:
            return self.sources[0].relative_to(ROOT).with_suffix("")
        return self.folder.relative_to(ROOT) / f"unit-{hashlib.sha256(self._text().encode()).hexdigest()[:8]}"

    def _text(self) -> str:
        of_library = self.folder.is_relative_to(SOURCE_ROOT)  # by -I, which leads to a copy that has a planted bug
        paths = [path.relative_to(SOURCE_ROOT) if of_library else path for path in self.sources]
        return "".join(f'#include "{path}"\n' for path in paths)

    def file(self) -> Path:
        """Return the file to compile, which includes the sources if they are several."""
        if len(self.sources) == 1:
            return self.sources[0].relative_to(ROOT)
        file = ROOT / "build" / "native" / "units" / self.name.with_suffix(".cpp")
        if not file.exists():  # its name tells its content
            file.parent.mkdir(parents=True, exist_ok=True)
            temporary = file.with_name(f"{file.name}.tmp{os.getpid()}")
            temporary.write_text(self._text())
            temporary.replace(file)
        return file

    def title(self) -> str:
        return ", ".join(str(path.relative_to(ROOT)) for path in self.sources)


def units_of(sources: Sequence[Path]) -> list[Unit]:
    """Return sources as the units in which they are compiled."""
    folders: dict[tuple[Path, bool], list[Path]] = {}
    for source in sources:
        folders.setdefault((source.parent, _is_bindings(source)), []).append(source)
    units = []
    for (folder, _), members in folders.items():
        if folder == SOURCE_ROOT / ALONE:
            units += [Unit((source,)) for source in members]
            continue
        sizes = [source.stat().st_size for source in members]
        count = -(-sum(sizes) // (BINDINGS_UNIT_BYTES if _is_bindings(members[0]) else UNIT_BYTES))
        cut: list[list[Path]] = [[] for _ in range(count)]
        for source, before in zip(members, itertools.accumulate(sizes, initial=0)):
            cut[before * count // sum(sizes)].append(source)
        units += [Unit(tuple(part)) for part in cut if part]
    return units


def library_sources(variant: Variant, for_tests: bool = True) -> list[Path]:
    """Return the sources of csrc/ for a variant, without those of the bindings.

    The compiler is asked at every build which optional sources can be included, so that a build becomes stale when the
    machine has since got their headers.
    """
    compiler, _ = find_compiler(variant)
    has_libfabric = _accepts(tuple(compiler), "-include", LIBFABRIC_HEADER)
    left_out = [SOURCE_ROOT / (WITHOUT_LIBFABRIC if has_libfabric else WITH_LIBFABRIC)]
    left_out.append(SOURCE_ROOT / BINDINGS)
    if not variant.interprets:
        left_out.append(SOURCE_ROOT / INTERPRETER)
    if not for_tests:
        left_out.append(SOURCE_ROOT / TEST_NETWORKS)
    everything = sorted(SOURCE_ROOT.rglob("*.cpp"))
    return [path for path in everything if not any(path.is_relative_to(folder) for folder in left_out)]


def job_count() -> int:
    """Return the number of parallel compilations: `DEEP_EP_JOBS`, or the cores this process may use, at most 8."""
    return int(os.environ.get("DEEP_EP_JOBS", "0")) or min(len(os.sched_getaffinity(0)), 8)


def extension_suffix() -> str:
    return sysconfig.get_config_var("EXT_SUFFIX")


def _python_flags() -> list[str]:
    import pybind11

    return ["-isystem", pybind11.get_include(), "-isystem", sysconfig.get_path("include")]


def _dependencies(depfile: Path) -> list[Path] | None:
    try:
        text = depfile.read_text()
    except OSError:
        return None
    names = text.replace("\\\n", " ").partition(":")[2]
    return [Path(re.sub(r"\\(.)", r"\1", name)) for name in re.findall(r"(?:\\.|\S)+", names)]


def _is_current(target: Path, command: list[str], inputs: list[Path] | None) -> bool:
    stamp = target.with_name(target.name + ".cmd")
    if inputs is None or not target.exists() or not stamp.exists() or stamp.read_text() != shlex.join(command):
        return False
    built = target.stat().st_mtime_ns
    return all(path.exists() and path.stat().st_mtime_ns <= built for path in inputs)


def _run(command: list[str], target: Path, more: Sequence[str] = ()) -> None:
    """Run `command`, which lacks `-o`, and move its result to `target` with the start of the run as its mtime.

    This mtime makes an edit during the compilation count as newer. `more` holds arguments that affect the time that the
    command takes but not its result.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    started = time.time_ns()
    temporary = target.with_name(target.name + f".tmp{os.getpid()}")
    result = subprocess.run([*command, *more, "-o", str(temporary)], cwd=ROOT, capture_output=True, text=True)
    if result.returncode != 0:
        temporary.unlink(missing_ok=True)
        raise BuildError(f"{shlex.join(command)}\n{result.stdout}{result.stderr}")
    if result.stderr.strip():
        print(result.stderr, file=sys.stderr)
    os.utime(temporary, ns=(started, started))
    temporary.replace(target)
    target.with_name(target.name + ".cmd").write_text(shlex.join(command))


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def objects_folder(variant: Variant) -> Path:
    """Return the folder for the variant's intermediate files."""
    return ROOT / "build" / "native" / variant.name


def _is_bindings(source: Path) -> bool:
    """Return whether a source may include Python.h: in csrc/ only the bindings may."""
    if source.is_relative_to(SOURCE_ROOT):
        return source.is_relative_to(SOURCE_ROOT / BINDINGS)
    return source.name == "module.cpp"


def compile_flags(variant: Variant, source: Path, module: str) -> list[str]:
    """Return the flags to compile `source` for `module`, whose name only bindings see."""
    flags = [*COMMON_FLAGS, *variant.flags, f"-I{SOURCE_ROOT.relative_to(ROOT)}"]
    if not (variant.uninstrumented and source.is_relative_to(SOURCE_ROOT / variant.uninstrumented)):
        flags += variant.instrument
    if any(source.is_relative_to(SOURCE_ROOT / folder) for folder in HOST_FOLDERS):
        flags += variant.host_flags
    if not source.is_relative_to(SOURCE_ROOT):
        flags += [*variant.kernel_flags, *variant.test_flags]
    if any(source.is_relative_to(SOURCE_ROOT / folder) for folder in KERNELS):
        flags += variant.kernel_flags
    if _is_bindings(source):
        # pybind11 shares types and exception translators between modules of the same ABI. Ours must be private to each
        # module: where the C++ library is linked into each of them (zig), no module can catch what another throws.
        flags += [*BINDINGS_FLAGS, f'-DPYBIND11_BUILD_ABI="_{module}"', *_python_flags()]
    return flags


def _compile(title: str, command: list[str], depfile: Path, output: Path, begin: Sequence[str] = ()) -> None:
    """Run a compilation if needed. For `begin`, see precompiled()."""
    command = [*command, "-MF", str(depfile)]
    inputs = _dependencies(depfile)
    if not _is_current(output, command, inputs and [ROOT / path for path in inputs]):
        print(title, flush=True)
        _run(command, output, begin)


def precompiled(variant: Variant, compiler: list[str], flags: Sequence[str], headers: Sequence[str]) -> list[str]:
    """Precompile headers if needed; return the arguments that make a compilation with these flags use them.

    Returns none if the compiler does not support this or is called through another program: by default, ccache does not
    cache such compilations.
    """
    if Path(compiler[0]).name.startswith(("ccache", "sccache", "distcc", "python")):
        return []
    text = "".join(f"#include <{header}>\n" for header in headers)
    key = hashlib.sha256("\n".join([*compiler, *flags, text]).encode()).hexdigest()[:12]
    header = objects_folder(variant) / "headers" / f"{key}.h"
    if not header.exists() or header.read_text() != text:  # its mtime matters
        header.parent.mkdir(parents=True, exist_ok=True)
        header.write_text(text)
    output, depfile = header.with_suffix(".h.pch" if variant.clang else ".h.gch"), header.with_suffix(".d")
    command = [*compiler, *flags, "-MD", "-x", "c++-header", str(header)]
    try:
        _compile(f"[{variant.name}] standard headers", command, depfile, output)
    except BuildError:
        return []
    return ["-include-pch", str(output)] if variant.clang else ["-include", str(header)]


def _objects(variant: Variant, compiler: list[str], sources: Sequence[Path], module: str) -> list[Path]:
    """Compile stale objects, the largest unit first, and return all object files."""

    def output_of(unit: Unit) -> Path:
        folder = module if _is_bindings(unit.sources[0]) else ""
        return objects_folder(variant) / folder / unit.name.with_suffix(".o")

    def headers_of(flags: tuple[str, ...], unit: Unit) -> list[str]:
        headers = BINDINGS_HEADERS if _is_bindings(unit.sources[0]) else STANDARD_HEADERS
        return precompiled(variant, compiler, flags, headers)

    def compile_one(unit: Unit, flags: tuple[str, ...]) -> None:
        output = output_of(unit)
        command = [*compiler, *flags, "-MMD", "-c", str(unit.file())]
        begin = begins[flags].result() if flags in begins else []
        _compile(f"[{variant.name}] {unit.title()}", command, output.with_suffix(".d"), output, begin)

    units = units_of(sources)
    flags_of = {unit: tuple(compile_flags(variant, unit.sources[0], module)) for unit in units}
    # Those that are alone include next to nothing.
    count = Counter(flags for unit, flags in flags_of.items() if unit.folder != SOURCE_ROOT / ALONE)
    one_of = {flags: unit for unit, flags in flags_of.items() if count[flags] >= PRECOMPILED_FOR}
    with ThreadPoolExecutor(job_count()) as pool:
        begins = {flags: pool.submit(headers_of, flags, unit) for flags, unit in one_of.items()}
        by_size = sorted(units, key=lambda unit: sum(path.stat().st_size for path in unit.sources), reverse=True)
        futures = [pool.submit(compile_one, unit, flags_of[unit]) for unit in by_size]
        try:
            for future in futures:
                future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return [output_of(unit) for unit in units]


def bindings_sources(variant: Variant) -> list[Path]:
    """Return the sources of csrc/ that bind a variant to Python."""
    sources = sorted((SOURCE_ROOT / BINDINGS).glob("*.cpp"))
    return sources + sorted((SOURCE_ROOT / INTERPRETER_BINDINGS).glob("*.cpp")) if variant.interprets else sources


def _bindings(variant: Variant, sources: Sequence[Path], module: str) -> list[Path]:
    """Return the objects of bindings, brought up to date, for a module of the variant."""
    with_zig = variant.clang and find_clang().is_zig  # whose C++ library is another
    shared = Variant("bindings-zig" if with_zig else "bindings", (), clang=with_zig)
    compiler, _ = find_compiler(shared)
    if _accepts(tuple(compiler), COLLECT_NOTHING):
        compiler = [*compiler, COLLECT_NOTHING]
    with _locked(objects_folder(shared) / ".lock"):
        return _objects(shared, compiler, sources, module)


def _link(variant: Variant, command: list[str], flags: Sequence[str], objects: Sequence[Path], target: Path) -> bool:
    """Link if needed, and return whether it was needed."""
    command = [*command, "-pthread", *map(str, objects), *flags, "-ldl"]
    if _is_current(target, command, list(objects)):
        return False
    print(f"[{variant.name}] link {target.name}", flush=True)
    _run(command, target)
    return True


def build_module(variant: Variant, sources: Sequence[Path], target: Path, link: Sequence[str] = ()) -> bool:
    """Bring a shared library of `sources` up to date; return whether anything had changed.

    `link` holds additional linker arguments.
    """
    compiler, link_flags = find_compiler(variant)
    bindings = [source for source in sources if _is_bindings(source)]
    others = [source for source in sources if not _is_bindings(source)]
    with _locked(objects_folder(variant) / ".lock"):
        objects = _objects(variant, compiler, others, "")
        if bindings:
            objects += _bindings(variant, bindings, target.name.partition(".")[0])
        return _link(variant, [*compiler, "-shared"], (*link_flags, *link), objects, target)


def build_extension(variant: Variant, target: Path, for_tests: bool = True) -> bool:
    """Bring `target`, the variant's extension module, up to date; return whether anything had changed.

    What only tests of the library use can be left out.
    """
    linked = objects_folder(variant) / ("" if for_tests else "installed") / target.name
    compiler, link_flags = find_compiler(variant)
    with _locked(objects_folder(variant) / ".lock"):
        objects = _objects(variant, compiler, library_sources(variant, for_tests), "")
        objects += _bindings(variant, bindings_sources(variant), "deep_ep_py")
        changed = _link(variant, [*compiler, "-shared"], link_flags, objects, linked)
    if not target.exists() or target.stat().st_mtime_ns != linked.stat().st_mtime_ns:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{target.name}.tmp{os.getpid()}")
        shutil.copy2(linked, temporary)
        temporary.replace(target)
    return changed


def build_program(variant: Variant, own: Sequence[Path], target: Path) -> None:
    """Link sources with all of csrc/ except the bindings into a program. Do not run it with a preloaded runtime."""
    compiler, link_flags = find_compiler(variant, program=True)
    with _locked(objects_folder(variant) / ".lock"):
        objects = _objects(variant, compiler, [*library_sources(variant), *own], "")
        _link(variant, compiler, link_flags, objects, target)
