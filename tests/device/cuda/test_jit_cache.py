"""Kernels are compiled once per machine, even if processes start simultaneously and some are killed."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from deep_ep_py.base import sources as sources_module
from deep_ep_py.device.jit import (
    KERNELS,
    CompiledKernel,
    Kernel,
    KernelCache,
    NvrtcUnavailableError,
    Shape,
    require_nvrtc,
)
from deep_ep_py.device.jit import cache as cache_module
from deep_ep_py.device.jit.compiler import compile_kernel
from deep_ep_py.device.jit.resources import Resources

pytestmark = pytest.mark.once

ARCH = "sm_90a"
SHAPE = Shape()
SPAWN = multiprocessing.get_context("spawn")
RESOURCES = Resources(32, 1, 0, 0, 0, 0, 0, 128)


@pytest.fixture(autouse=True)
def nvrtc() -> None:
    try:
        require_nvrtc()
    except NvrtcUnavailableError as error:
        pytest.skip(str(error))


class SlowCompiler:
    """A stand-in for NVRTC that logs which process compiles what, and is slow."""

    def __init__(self, log: Path, seconds: float = 0.3) -> None:
        self.log, self.seconds = log, seconds

    def __call__(self, kernel: Kernel, shape: Shape, architecture: str) -> CompiledKernel:
        with self.log.open("a") as file:
            file.write(f"{kernel.name} {os.getpid()}\n")
        time.sleep(self.seconds)
        cubin = f"{kernel.name} {shape} {architecture}".encode() + b"\n\x00\xff"
        return CompiledKernel(kernel.name, architecture, f"_Z{kernel.name}", cubin, RESOURCES, self.seconds, "the log")

    def compiled(self) -> list[str]:
        return [line.split()[0] for line in self.log.read_text().splitlines()] if self.log.exists() else []


def get_all(folder: Path, compiler: SlowCompiler, start: int) -> None:
    kernels = KernelCache(folder, compiler).get_all(KERNELS.values(), SHAPE, ARCH, start)
    assert [kernel.name for kernel in kernels] == list(KERNELS)


def start_process(*arguments: object) -> multiprocessing.process.BaseProcess:
    process = SPAWN.Process(target=get_all, args=arguments)
    process.start()
    return process


def test_a_kernel_comes_back_as_it_was(tmp_path: Path) -> None:
    kernel = KERNELS["scale_columns"]
    made = KernelCache(tmp_path).get(kernel, SHAPE, ARCH)
    assert made.cubin[:4] == b"\x7fELF"

    def never(*_: object) -> CompiledKernel:
        raise AssertionError("compiled twice")

    assert KernelCache(tmp_path, never).get(kernel, SHAPE, ARCH) == made


def test_what_makes_another_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = KernelCache(tmp_path)
    sources = tmp_path / "csrc"
    for folder in ("wire", "device", "fabric", "kernels"):
        (sources / folder).mkdir(parents=True)
    header = sources / "device" / "one.h"

    def path_with(text: str) -> Path:
        header.write_text(text)
        sources_module.sources_hash.cache_clear()
        return kernels.path(KERNELS["layout"], SHAPE, ARCH)

    first = kernels.path(KERNELS["layout"], SHAPE, ARCH)
    others = {
        kernels.path(KERNELS["combine"], SHAPE, ARCH),
        kernels.path(KERNELS["layout"], Shape(ranks=4), ARCH),
        kernels.path(KERNELS["layout"], SHAPE, "sm_100a"),
    }
    with monkeypatch.context() as patch:
        patch.setattr(cache_module, "OPTIONS", {"std": "c++20"})
        others.add(kernels.path(KERNELS["layout"], SHAPE, ARCH))
    with monkeypatch.context() as patch:
        patch.setattr(cache_module, "nvrtc_version", lambda: "99.9")
        others.add(kernels.path(KERNELS["layout"], SHAPE, ARCH))
    with monkeypatch.context() as patch:
        patch.setattr(sources_module, "include_root", lambda: sources)
        others |= {path_with("one"), path_with("another")}
    sources_module.sources_hash.cache_clear()
    assert first not in others and len(others) == 7
    assert kernels.path(KERNELS["layout"], SHAPE, ARCH) == first


@pytest.mark.thorough
def test_processes_that_start_at_once_compile_each_kernel_once(tmp_path: Path) -> None:
    compiler = SlowCompiler(tmp_path / "log")
    processes = [start_process(tmp_path / "cache", compiler, rank) for rank in range(4)]
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * 4
    assert sorted(compiler.compiled()) == sorted(KERNELS)


@pytest.mark.thorough
def test_processes_share_the_work(tmp_path: Path) -> None:
    """Processes that begin with different kernels compile different ones."""
    compiler = SlowCompiler(tmp_path / "log", seconds=2.0)
    processes = [start_process(tmp_path / "cache", compiler, rank) for rank in range(3)]
    for process in processes:
        process.join(60)
    pids = {line.split()[1] for line in compiler.log.read_text().splitlines()}
    assert len(pids) > 1


def test_the_next_one_compiles_when_one_is_killed(tmp_path: Path) -> None:
    compiler = SlowCompiler(tmp_path / "log", seconds=600)
    killed = start_process(tmp_path / "cache", compiler, 0)
    while not compiler.compiled():
        assert killed.is_alive()
        time.sleep(0.01)
    os.kill(killed.pid, signal.SIGKILL)
    killed.join(60)
    compiler.seconds = 0.0
    get_all(tmp_path / "cache", compiler, 0)
    first = next(iter(KERNELS))
    assert sorted(compiler.compiled()) == sorted([first, *KERNELS])


@pytest.mark.parametrize("damage", ["truncated", "other bytes", "other fields", "empty"])
def test_a_damaged_file_is_made_anew(tmp_path: Path, damage: str) -> None:
    compiler = SlowCompiler(tmp_path / "log", seconds=0.0)
    kernels = KernelCache(tmp_path, compiler)
    made = kernels.get(KERNELS["layout"], SHAPE, ARCH)
    path = kernels.path(KERNELS["layout"], SHAPE, ARCH)
    whole = path.read_bytes()
    damaged = {
        "truncated": whole[:-3],
        "other bytes": whole[:-1] + b"\x00",
        "other fields": whole.replace(b'"symbol"', b'"sybmol"'),
        "empty": b"",
    }
    path.write_bytes(damaged[damage])
    assert kernels.get(KERNELS["layout"], SHAPE, ARCH) == made
    assert path.read_bytes() == whole
    assert compiler.compiled() == ["layout", "layout"]


def test_a_failed_compile_leaves_nothing(tmp_path: Path) -> None:
    def fails(*_: object) -> CompiledKernel:
        raise RuntimeError("no")

    for _ in range(2):
        with pytest.raises(RuntimeError, match="no"):
            KernelCache(tmp_path, fails).get(KERNELS["layout"], SHAPE, ARCH)
    assert [path.suffix for path in tmp_path.iterdir()] in ([], [".lock"])


def get_one(folder: Path, compiler: SlowCompiler) -> CompiledKernel:
    return KernelCache(folder, compiler).get(KERNELS["layout"], SHAPE, ARCH)


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o1777])
@pytest.mark.parametrize("which", ["folder", "above"])
def test_a_folder_that_others_may_write_is_refused(tmp_path: Path, which: str, mode: int) -> None:
    """A user who may write there chooses the code that this process runs. A parent folder may be sticky, as /tmp is."""
    above, folder = tmp_path / "above", tmp_path / "above" / "cache"
    folder.mkdir(parents=True)
    compiler = SlowCompiler(tmp_path / "log", seconds=0.0)
    get_one(folder, compiler)
    opened = folder if which == "folder" else above
    opened.chmod(mode)
    if (which, mode) == ("above", 0o1777):
        get_one(folder, compiler)
        return
    link = tmp_path / "link"
    link.symlink_to(folder)
    for named in (folder, link):
        with pytest.raises(PermissionError, match=rf"{named}: expected .* but other users may write {opened} \(mode"):
            get_one(named, compiler)
    opened.chmod(0o755)
    get_one(folder, compiler)
    assert compiler.compiled() == ["layout"]


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to give a folder to another user")
def test_what_is_another_users_is_refused(tmp_path: Path) -> None:
    compiler = SlowCompiler(tmp_path / "log", seconds=0.0)
    folder = tmp_path / "cache"
    get_one(folder, compiler)
    os.chown(folder, 12345, -1)
    with pytest.raises(PermissionError, match=f"{folder} belongs to user 12345"):
        get_one(folder, compiler)
    os.chown(folder, 0, -1)
    (file,) = folder.glob("*.kernel")
    os.chown(file, 12345, -1)
    get_one(folder, compiler)
    assert compiler.compiled() == ["layout", "layout"]


def test_a_file_that_others_may_write_is_made_anew(tmp_path: Path) -> None:
    compiler = SlowCompiler(tmp_path / "log", seconds=0.0)
    get_one(tmp_path / "cache", compiler)
    (file,) = (tmp_path / "cache").glob("*.kernel")
    file.chmod(0o666)
    get_one(tmp_path / "cache", compiler)
    assert compiler.compiled() == ["layout", "layout"]
    assert file.stat().st_mode & 0o777 == 0o600


def test_folders_are_made_for_this_user_alone(tmp_path: Path) -> None:
    before = os.umask(0o002)
    try:
        get_one(tmp_path / "one" / "two", SlowCompiler(tmp_path / "log", seconds=0.0))
    finally:
        os.umask(before)
    assert [path.stat().st_mode & 0o777 for path in (tmp_path / "one", tmp_path / "one" / "two")] == [0o700] * 2


def test_the_folder_is_chosen_by_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEP_EP_CACHE_DIR", str(tmp_path / "mine"))
    assert KernelCache().folder == tmp_path / "mine"
    monkeypatch.delenv("DEEP_EP_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert KernelCache().folder == tmp_path / "deep_ep_py"
    assert KernelCache()._compile is compile_kernel


def test_without_a_home_the_folder_is_among_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("DEEP_EP_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file" / "below"))
    (tmp_path / "file").touch()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = tmp_path / f"deep_ep_py-{os.getuid()}"
    assert KernelCache().folder == KernelCache().folder == folder
    (said,) = caplog.messages
    assert str(folder) in said and "DEEP_EP_CACHE_DIR" in said
    get_one(folder, SlowCompiler(tmp_path / "log", seconds=0.0))
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o755, 0o777])
def test_where_root_is_not_mapped(tmp_path: Path, mode: int) -> None:
    """In such a user namespace `/` has the id of unmapped users, as everything of other users does."""
    namespace = ["unshare", "-U", "--map-user=1000"]
    if shutil.which(namespace[0]) is None or subprocess.run([*namespace, "true"], capture_output=True).returncode != 0:
        pytest.skip("needs the right to make a user namespace")
    above = tmp_path / "above"
    (above / "cache").mkdir(parents=True)
    above.chmod(mode)
    if os.getuid() == 0:  # and so is the only user that is mapped
        os.chown(above, 12345, -1)
    program = f"""
from pathlib import Path
from deep_ep_py.device.jit.cache import refuse_if_others_may_write
cache = Path({str(above / "cache")!r})
assert 65534 in [part.stat().st_uid for part in cache.parents]
refuse_if_others_may_write(cache)
"""
    done = subprocess.run([*namespace, sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode == 0) == (mode == 0o755), done.stderr
    assert mode == 0o755 or "other users may write" in done.stderr
