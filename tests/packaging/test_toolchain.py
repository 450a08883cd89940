"""The choice of compilers: what `CXX` and `CLANGXX` name is taken or refused, never replaced by another."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import setup_venv
import toolchain
from places import ROOT

pytestmark = pytest.mark.once

Compiler = Callable[[str, str], Path]


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    """Makes a compiler of a name that says it has a version, and can do nothing else; there are no others."""
    for variable in ("CXX", "CLANGXX"):
        monkeypatch.delenv(variable, raising=False)

    def make(name: str, version: str) -> Path:
        path = tmp_path / name
        path.write_text(f'#!/bin/sh\ncase "$*" in -dumpversion) echo {version} ;; *) exit 1 ;; esac\n')
        path.chmod(0o755)
        return path

    monkeypatch.setenv("PATH", str(tmp_path))
    return make


@pytest.mark.parametrize("command", ["g++-99", "/nowhere/g++ -O2"])
def test_a_command_in_cxx_that_is_not_there(compiler: Compiler, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    compiler("g++", "12")
    monkeypatch.setenv("CXX", command)
    with pytest.raises(toolchain.BuildError) as info:
        toolchain.find_gcc()
    said = f"CXX='{command}': expected a compiler's command, but {command.split()[0]} is not found"
    assert str(info.value) == said


def test_a_command_in_clangxx_that_is_not_there(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CLANGXX", "clang++-99")
    with pytest.raises(toolchain.BuildError, match=r"^CLANGXX='clang\+\+-99': .*clang\+\+-99 is not found"):
        toolchain.find_clang(tmp_path)


def test_a_command_in_clangxx_without_thread_sanitizer(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    named = compiler("other", "19.1.7")
    monkeypatch.setenv("CLANGXX", str(named))
    with pytest.raises(toolchain.BuildError, match=rf"^CLANGXX='{named}': expected a clang\+\+ with a ThreadSanitizer"):
        toolchain.find_clang(tmp_path)


@pytest.mark.parametrize("version", ["12", "12.2.0", "15", "unknown"])
def test_a_compiler_that_is_new_enough(compiler: Compiler, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    compiler("g++", version)
    assert toolchain.find_gcc() == ["g++"]
    other = str(compiler("other", version))
    monkeypatch.setenv("CXX", f"{other} -O2")
    assert toolchain.find_gcc() == [other, "-O2"]


@pytest.mark.parametrize(("version", "named"), [("11", False), ("11.4.0", True), ("9.3.0", True)])
def test_a_compiler_that_is_too_old(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch, version: str, named: bool
) -> None:
    """It is refused before it compiles anything, with its version and what is expected."""
    whose = str(compiler("g++", version))
    if named:
        monkeypatch.setenv("CXX", whose)
    begin = f"CXX='{whose}'" if named else "g++"
    with pytest.raises(toolchain.BuildError) as info:
        toolchain.find_gcc()
    assert str(info.value).startswith(f"{begin}: version {version}, expected g++ 12 or newer; install one")


def test_setup_says_so(compiler: Compiler) -> None:
    """The message is the last line, without a traceback."""
    old = compiler("g++", "11.4.0")
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    environment = {**os.environ, "CXX": str(old), "DEEP_EP_BUILDS": "fast"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode != 0 and "Traceback" not in done.stderr
    said = done.stderr.splitlines()[-1]
    assert said.startswith(f"error: CXX='{old}': version 11.4.0, expected g++ 12 or newer"), done.stderr


def test_no_clang_is_installed_where_one_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """If it cannot be used, the build says why."""
    monkeypatch.setenv("CLANGXX", "clang++-99")
    monkeypatch.setattr(setup_venv, "run", lambda *command: pytest.fail(f"ran {command}"))
    setup_venv.need_clang(tmp_path)
