"""Compiler discovery: g++ for the extension, a clang++ for its ThreadSanitizer build."""

from __future__ import annotations

import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

OLDEST_GCC = 12
CLANG_VERSIONS = range(21, 13, -1)
NO_CLANG = (
    "no clang++ with a ThreadSanitizer runtime found: install one (Debian: clang-19 libclang-rt-19-dev), "
    "or `pip install ziglang`, or name one in CLANGXX"
)


class BuildError(RuntimeError):
    """A compiler is missing or too old, or has rejected a file; the message is meant for the user."""


@dataclass(frozen=True)
class Clang:
    """A clang++ that can build for ThreadSanitizer."""

    command: list[str]
    runtime: Path  # the shared runtime to preload; with zig, make_runtime creates it
    flags: tuple[str, ...] = ()
    module_flags: tuple[str, ...] = ("-shared-libsan", "-fsanitize=thread")  # to link modules loaded after the runtime
    libraries: tuple[str, ...] = ()
    symbolizer: str | None = None

    @property
    def is_zig(self) -> bool:
        return "ziglang" in self.command

    def make_runtime(self) -> None:
        """Link the runtime to preload if the compiler has it only as an archive, as zig does."""
        if not self.is_zig or self.runtime.exists():
            return
        self.runtime.parent.mkdir(parents=True, exist_ok=True)
        source = self.runtime.with_suffix(".cpp")
        source.write_text("int read_through(const int* p) { return *p; }\n")  # a reference to the runtime pulls it in
        temporary = self.runtime.with_suffix(f".tmp{os.getpid()}")
        command = [*self.command, "-fPIC", "-O1", "-shared", "-fsanitize=thread", str(source), "-o", str(temporary)]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode != 0:
            raise BuildError(f"{shlex.join(command)}\n{result.stderr}")
        temporary.replace(self.runtime)


def _named_in(variable: str) -> list[str]:
    """Return the command that an environment variable names; empty if it names none."""
    value = os.environ.get(variable, "")
    command = shlex.split(value)
    if command and not shutil.which(command[0]):
        raise BuildError(f"{variable}={value!r}: expected a compiler's command, but {command[0]} is not found")
    return command


def _found(*names: str) -> list[list[str]]:
    return [[name] for name in names if shutil.which(name)]


def find_gcc() -> list[str]:
    """Return the command of the C++ compiler of all variants but tsan: `CXX`, otherwise g++, otherwise c++."""
    named = _named_in("CXX")
    for command in (named, *_found("g++", "c++")):
        if command:
            _check_version(command, f"CXX={os.environ['CXX']!r}" if named else command[0])
            return command
    raise BuildError(f"no C++ compiler found: install g++ ({OLDEST_GCC} or newer), or name one in CXX")


def _check_version(command: list[str], whose: str) -> None:
    """Refuse a compiler that is too old; clang's versions that are as low are too old as well."""
    asked = subprocess.run([*command, "-dumpversion"], capture_output=True, text=True)
    version = asked.stdout.strip()
    major = version.partition(".")[0]
    if asked.returncode == 0 and major.isdecimal() and int(major) < OLDEST_GCC:
        raise BuildError(
            f"{whose}: version {version}, expected g++ {OLDEST_GCC} or newer; install one, and name it in CXX "
            f"(export CXX=g++-{OLDEST_GCC})"
        )


def _libgcc() -> str:
    """Return the path of libgcc, which __builtin_cpu_supports needs; zig's runtime library lacks that part."""
    return subprocess.check_output([*find_gcc(), "-print-libgcc-file-name"], text=True).strip()


def _runtime(command: list[str]) -> Path | None:
    for name in (f"libclang_rt.tsan-{platform.machine()}.so", "libclang_rt.tsan.so"):
        result = subprocess.run([*command, f"-print-file-name={name}"], capture_output=True, text=True)
        path = Path(result.stdout.strip())
        if result.returncode == 0 and path.is_absolute() and path.exists():
            return path
    return None


def find_clang(build_folder: Path) -> Clang | None:
    """Return a clang++ with ThreadSanitizer: `CLANGXX`, the newest of the system, that of pip's ziglang, or None."""
    if named := _named_in("CLANGXX"):
        if runtime := _runtime(named):
            return Clang(named, runtime)
        raise BuildError(f"CLANGXX={os.environ['CLANGXX']!r}: expected a clang++ with a ThreadSanitizer runtime")
    for command in _found(*(f"clang++-{version}" for version in CLANG_VERSIONS), "clang++"):
        if runtime := _runtime(command):
            return Clang(command, runtime)
    if importlib.util.find_spec("ziglang"):
        return Clang(
            [sys.executable, "-m", "ziglang", "c++"],
            build_folder / "tsan_runtime" / "libtsan_zig.so",
            flags=("-fno-sanitize=undefined", "-mcpu=baseline"),  # zig's defaults differ
            # The sanitizer runtime is an archive, so the module must not link a second copy. libc++ is an archive
            # too, and the module must throw through its own copy, not through the libstdc++ that torch has loaded.
            module_flags=("-Wl,-Bsymbolic",),
            libraries=(_libgcc(),),
            symbolizer=shutil.which("addr2line"),  # others are C++ programs, which this preloaded runtime breaks
        )
    return None
