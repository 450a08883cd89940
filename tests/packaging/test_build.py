"""The build of the project: its variants, and what is rebuilt when."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import native_build
import toolchain
from builds import LONG
from deep_ep_py.base import native

pytestmark = pytest.mark.once

MODULE = """\
#include <Python.h>
#include "host/answer.h"
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
PyMODINIT_FUNC PyInit__C_fast() {
    PyObject* module = PyModule_Create(&definition);
    PyModule_AddIntConstant(module, "answer", answer());
    return module;
}
"""


class Tree:
    """A project of two sources and a header, built like the real one."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.target = root / f"_C_fast{native_build.extension_suffix()}"
        self.write("python/module.cpp", MODULE)
        self.write("host/answer.h", "int answer();\n")
        self.write("host/answer.cpp", '#include "host/answer.h"\nint answer() { return 41; }\n')
        self.write("observe/other.cpp", "int other = 0;\n")

    def write(self, name: str, text: str) -> None:
        path = self.root / "csrc" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def build(self) -> bool:
        native_build._accepts.cache_clear()  # in reality, each build is another process
        return native_build.build_extension(native_build.VARIANTS["fast"], self.target)

    def answer(self) -> int:
        code = f"import sys; sys.path.insert(0, {str(self.root)!r}); import _C_fast; print(_C_fast.answer)"
        return int(subprocess.check_output([sys.executable, "-c", code]))


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tree]:
    monkeypatch.setattr(native_build, "ROOT", tmp_path)
    monkeypatch.setattr(native_build, "SOURCE_ROOT", tmp_path / "csrc")
    yield Tree(tmp_path)
    native_build._accepts.cache_clear()


def test_an_optional_header_that_is_installed_later(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install the package, then build the library again, which now finds the header it lacked (docs/nodes.md)."""
    monkeypatch.setattr(native_build, "LIBFABRIC_HEADER", "installed/later.h")
    monkeypatch.setenv("CPATH", str(tree.root / "include"))
    (tree.root / "csrc/host/answer.cpp").unlink()
    tree.write(f"{native_build.WITH_LIBFABRIC}/answer.cpp", "#include <installed/later.h>\n")
    tree.write(f"{native_build.WITHOUT_LIBFABRIC}/answer.cpp", "int answer() { return 41; }\n")
    tree.build()
    assert tree.answer() == 41

    tree.write("../include/installed/later.h", "inline int of_later = 42;\nint answer() { return of_later; }\n")
    assert tree.build()
    assert tree.answer() == 42


@pytest.mark.parametrize("compiler", ["g++", *filter(shutil.which, ("clang++", "clang++-19"))])
def test_compilers_of_the_variants_without_a_sanitizer(
    tree: Tree, compiler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only one of them takes what speeds up the compilation of bindings."""
    monkeypatch.setenv("CXX", compiler)
    assert tree.build()
    assert tree.answer() == 41
    built = "".join(path.read_text() for path in (tree.root / "build/native/bindings").rglob("module.o.cmd"))
    assert (native_build.COLLECT_NOTHING in built) == (compiler == "g++")


def test_build_does_only_what_changed(tree: Tree, capfd: pytest.CaptureFixture[str]) -> None:
    assert tree.build()
    assert tree.answer() == 41
    assert not tree.build()

    capfd.readouterr()
    time.sleep(0.01)
    tree.write("host/answer.h", "int answer();  // a header that two of three files include\n")
    assert tree.build()
    assert sorted(re.findall(r"\S+\.cpp", capfd.readouterr().out)) == ["csrc/host/answer.cpp", "csrc/python/module.cpp"]

    tree.write("host/answer.cpp", '#include "host/answer.h"\nint answer() { return 42; }\n')
    assert tree.build()
    assert tree.answer() == 42

    (tree.root / "csrc/observe/other.cpp").unlink()
    assert tree.build(), "a removed source must leave the library"


@pytest.mark.thorough
def test_standard_headers_are_compiled_once(
    tree: Tree, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """For sources with the same flags, if there are many and the compiler is called directly."""
    monkeypatch.setenv("CXX", "g++")
    tree.build()
    assert "headers" not in capfd.readouterr().out
    tree.write("sim/nic/begins.cpp", "std::vector<int> begins_behind_the_headers;\n")
    with pytest.raises(native_build.BuildError, match="vector"):
        tree.build()
    monkeypatch.setattr(native_build, "PRECOMPILED_FOR", 3)
    tree.build()
    assert capfd.readouterr().out.count("standard headers") == 1
    tree.write("sim/nic/begins.cpp", "std::string begins_behind_the_headers;\n")
    assert tree.build() and not tree.build()
    assert "headers" not in capfd.readouterr().out
    monkeypatch.setenv("CXX", "ccache g++")
    if shutil.which("ccache"):
        with pytest.raises(native_build.BuildError, match="string"):
            tree.build()


def test_sources_of_a_folder_are_compiled_together(
    tree: Tree, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As far as that leaves work for all cores; each still is rebuilt when it changes, and only in its unit."""
    for number in range(3):
        tree.write(f"sim/nic/part{number}.cpp", f"int part{number} = 0;\n")
    tree.build()
    assert "csrc/sim/nic/part0.cpp, csrc/sim/nic/part1.cpp, csrc/sim/nic/part2.cpp" in capfd.readouterr().out
    assert not tree.build()
    tree.write("sim/nic/part1.cpp", "int part1 = 1;\n")
    assert tree.build()
    assert re.findall(r"\S+\.cpp", capfd.readouterr().out) == [f"csrc/sim/nic/part{number}.cpp" for number in range(3)]

    monkeypatch.setattr(native_build, "UNIT_BYTES", 30)
    sources = sorted((tree.root / "csrc/sim/nic").glob("*.cpp"))
    assert [len(unit.sources) for unit in native_build.units_of(sources)] == [2, 1]


def test_bindings_are_apart_from_the_rest_of_their_folder() -> None:
    """They are not instrumented by sanitizers, and the rest must be."""
    sources = sorted((native_build.ROOT / "tests/native/selftest").glob("*.cpp"))
    units = [[source.name for source in unit.sources] for unit in native_build.units_of(sources)]
    assert units == [["kernels.cpp"], ["module.cpp"]]
    flags = {source.name: native_build.compile_flags(native_build.VARIANTS["asan"], source, "") for source in sources}
    assert [name for name in flags if "-fno-sanitize=all" in flags[name]] == ["module.cpp"]


@pytest.mark.skipif(not LONG, reason="compiles the bindings again: `make test-long` runs it")
def test_bindings_are_the_same_in_every_variant(tmp_path: Path) -> None:
    """All variants link the objects of one, so nothing that differs between variants may be compiled into them."""
    shared, compiler = native_build.Variant("bindings", ()), toolchain.find_gcc()
    sources = sorted((native_build.SOURCE_ROOT / native_build.BINDINGS).rglob("*.cpp"))
    sources.append(native_build.ROOT / "tests/native/selftest/module.cpp")
    other = [*native_build.TSAN_DEFINES, "-DDEEP_EP_ASAN=1"]
    for unit in native_build.units_of(sources):
        flags = native_build.compile_flags(shared, unit.sources[0], "deep_ep_py")
        objects = [tmp_path / "as_linked.o", tmp_path / "in_checked.o"]
        for output, defines in zip(objects, ([], other)):
            command = [*compiler, *flags, *defines, "-c", str(unit.file()), "-o", str(output)]
            subprocess.run(command, cwd=native_build.ROOT, check=True)
        assert objects[0].read_bytes() == objects[1].read_bytes(), unit.title()


def test_program_links_all_but_the_bindings(tree: Tree) -> None:
    main = tree.root / "tests/main.cpp"
    main.parent.mkdir()
    main.write_text('#include "host/answer.h"\nint main() { return answer(); }\n')
    program = tree.root / "build/program"
    native_build.build_program(native_build.VARIANTS["exact"], [main], program)
    assert subprocess.run([program]).returncode == 41


def test_build_follows_flags(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tree.build()
    monkeypatch.setattr(native_build, "COMMON_FLAGS", (*native_build.COMMON_FLAGS, "-DNEW"))
    assert tree.build()


def test_build_restores_a_lost_or_foreign_library(tree: Tree) -> None:
    tree.build()
    tree.target.write_bytes(b"not a library")
    tree.build()
    assert tree.answer() == 41


def test_build_refuses_warnings_and_keeps_the_old_library(tree: Tree) -> None:
    tree.build()
    tree.write("host/answer.cpp", '#include "host/answer.h"\nint answer() { int unused; return 43; }\n')
    with pytest.raises(native_build.BuildError, match="unused"):
        tree.build()
    assert tree.answer() == 41


def test_variants_from_env(monkeypatch: pytest.MonkeyPatch) -> None:
    def names(value: str) -> list[str]:
        monkeypatch.setenv("DEEP_EP_BUILDS", value)
        return [variant.name for variant in native_build.variants_from_env()]

    assert names("") == ["fast"]
    assert names("exact, fast,exact") == ["exact", "fast"]
    assert names("all") == ["fast", "exact", "asan", "tsan"]
    assert names("none") == []
    with pytest.raises(native_build.BuildError, match="quick"):
        names("fast,quick")
    assert set(native.BUILDS) == set(native_build.VARIANTS)


def test_executor_is_not_instrumented_for_threads() -> None:
    tsan = native_build.VARIANTS["tsan"]
    for source, instrumented in (("sim/executor/executor.cpp", False), ("sim/host/kernel_table.cpp", True)):
        flags = native_build.compile_flags(tsan, native_build.SOURCE_ROOT / source, "module")
        assert ("-fsanitize=thread" in flags) == instrumented
        assert "-DDEEP_EP_TSAN=1" in flags


def test_extension_needs_only_the_compiler_runtime() -> None:
    if shutil.which("readelf") is None:
        pytest.skip("readelf is not installed")
    text = subprocess.check_output(["readelf", "--dynamic", "--wide", native.C.__file__], text=True)
    needed = {re.split(r"[.-]", name)[0] for name in re.findall(r"NEEDED.*\[(.+)\]", text)}
    assert needed <= {"libstdc++", "libm", "libgcc_s", "libc", "libpthread", "libdl", "librt", "ld"}


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import sys; sys.modules['torch'] = None; import deep_ep_py", "pip install torch"),
        ("import os; os.environ['DEEP_EP_BUILD'] = 'quick'; import deep_ep_py", "expected one of fast"),
    ],
)
def test_import_says_what_is_missing(code: str, message: str) -> None:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 1
    assert "ImportError" in result.stderr
    assert message in result.stderr
