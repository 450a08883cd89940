"""A wheel: what is in it, and that the library works where only the wheel is installed."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import make_wheel
import toolchain
from builds import LONG
from deep_ep_py._version import __version__
from deep_ep_py.base.sources import sources_hash
from deep_ep_py.device.jit import NvrtcUnavailableError, require_nvrtc
from installations import Installation
from native_build import FOR_GPUS, VARIANTS, extension_suffix
from places import CSRC, ROOT, WORKERS

pytestmark = [pytest.mark.once, pytest.mark.thorough]

METADATA = {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE", "top_level.txt"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a wheel of the checkout, with the objects of the fast build."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("DEEP_EP_BUILDS", raising=False)
        return make_wheel.build(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installation(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installation:
    return Installation(wheel, tmp_path_factory.mktemp("installation"))


def device_headers() -> list[Path]:
    """Return the headers from which kernels are compiled."""
    return [path for folder in FOR_GPUS for path in (CSRC / folder).rglob("*.h")]


def expected_members() -> set[str]:
    """Return the names of the files that a wheel of the checkout must have."""
    package = ROOT / "deep_ep_py"
    files = [*package.rglob("*.py"), *(package / "_C").glob("*.pyi"), package / "py.typed"]
    names = {path.relative_to(ROOT).as_posix() for path in files}
    names |= {f"deep_ep_py/csrc/{path.relative_to(CSRC).as_posix()}" for path in device_headers()}
    names.add(f"deep_ep_py/{VARIANTS['fast'].module}{extension_suffix()}")
    return names | {f"deep_ep_py-{__version__}.dist-info/{name}" for name in METADATA}


def check_installed(installation: Installation) -> dict[str, str]:
    """Check that the library works and is all of the wheel's; return what the worker said."""
    said = json.loads(installation.run_script(WORKERS / "installed.py"))
    for place in ("package", "headers"):
        assert Path(said[place]).is_relative_to(installation.site / "deep_ep_py")
    version = installation.run("python", "-m", "deep_ep_py", "--version")
    assert version.startswith(f"deep_ep_py {__version__}, build fast, ")
    assert version.endswith(f"kernels {sources_hash()[:12]}\n"), "the kernels are not those of the checkout"
    assert installation.run("deep-ep", "--version") == version
    return said


def test_members(wheel: Path) -> None:
    """One extension; no tests, no objects, no sources but the headers of kernels."""
    assert make_wheel.members(wheel) == expected_members()
    assert "none-any" not in wheel.name


def test_it_works_where_only_the_wheel_is_installed(installation: Installation) -> None:
    check_installed(installation)


def test_networks_of_tests_are_left_out(installation: Installation, tmp_path: Path) -> None:
    program = tmp_path / "weak.py"
    program.write_text(
        "import deep_ep_py as deep_ep\n"
        "from deep_ep_py.testing import run_ranks\n"
        "run_ranks(2, lambda group: deep_ep.Buffer(group, 1 << 20, fabric='weak'))\n"
    )
    with pytest.raises(AssertionError, match='fabric "weak": this build has no network for it'):
        installation.run("python", str(program))


def test_it_compiles_a_kernel_where_only_the_wheel_is_installed(installation: Installation, tmp_path: Path) -> None:
    try:
        require_nvrtc()
    except NvrtcUnavailableError as error:
        pytest.skip(str(error))
    from cuda.pathfinder import load_nvidia_dynamic_lib

    # NVRTC's library is searched in the environment's own packages, then where any library is.
    library = load_nvidia_dynamic_lib("nvrtc").abs_path
    assert library is not None
    environment = {"LD_LIBRARY_PATH": str(Path(library).parent), "DEEP_EP_CACHE_DIR": str(tmp_path)}
    command = ["-m", "deep_ep_py", "compile", "--kernel", "layout", "--arch", "sm_90a"]
    assert "layout" in installation.run("python", *command, environment=environment)
    assert len(list(tmp_path.glob("layout-sm_90a-*.kernel"))) == 1


@pytest.mark.long
@pytest.mark.skipif(not LONG, reason="compiles all sources: `make test-long` runs it")
def test_from_a_source_distribution_without_libfabric(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkout, unpacked = tmp_path / "checkout", tmp_path / "unpacked"
    for name in ("csrc", "deep_ep_py", "scripts"):
        shutil.copytree(ROOT / name, checkout / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "LICENSE", "README.md", "CHANGELOG.md"):
        shutil.copy(ROOT / name, checkout)
    pack = "from setuptools import build_meta; build_meta.build_sdist('dist')"
    subprocess.run([sys.executable, "-c", pack], cwd=checkout, check=True, stdout=subprocess.DEVNULL)
    (archive,) = (checkout / "dist").glob("*.tar.gz")
    shutil.unpack_archive(archive, unpacked)
    shutil.rmtree(checkout)

    compiler = tmp_path / "without_libfabric"
    compiler.write_text(
        f'#!/bin/sh\ncase "$*" in *rdma/fabric.h*) exit 1 ;; esac\nexec {shlex.join(toolchain.find_gcc())} "$@"\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.delenv("DEEP_EP_BUILDS", raising=False)
    (root,) = unpacked.iterdir()
    wheel = make_wheel.build(tmp_path / "wheel", root)
    assert make_wheel.members(wheel) == expected_members()
    assert "headers were missing" in check_installed(Installation(wheel, tmp_path))["libfabric"]


class Tagging:
    """A wheel, and an auditwheel that does with it what a test says."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.wheel, self.found = folder / "a-1-cp3-linux.whl", folder / "found"
        self._program = folder / "bin" / "auditwheel"
        self._program.parent.mkdir()
        self.found.mkdir()
        with zipfile.ZipFile(self.wheel, "w") as archive:
            archive.writestr("a/module.so", "")
        monkeypatch.setenv("PATH", f"{self._program.parent}:/usr/bin:/bin")
        monkeypatch.setattr(make_wheel.sys, "executable", str(folder / "python"))

    def program(self, line: str) -> None:
        self._program.write_text(f"#!/bin/sh\n{line}\n")
        self._program.chmod(0o755)

    def result(self) -> Path:
        return make_wheel.tagged(self.wheel, self.found)


@pytest.fixture
def tagging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tagging:
    return Tagging(tmp_path, monkeypatch)


def test_auditwheel_determines_the_tag_if_it_is_there(tagging: Tagging) -> None:
    if shutil.which("auditwheel") is None:
        assert tagging.result() == tagging.wheel
    tagging.program(f"cp {tagging.wheel} {tagging.found}/a-1-cp3-manylinux.whl")
    assert tagging.result() == tagging.found / "a-1-cp3-manylinux.whl"


def test_a_library_that_auditwheel_bundles_is_refused(tagging: Tagging) -> None:
    with zipfile.ZipFile(tagging.wheel.with_suffix(".bundled"), "w") as archive:
        for name in ("a/", "a/module.so", "a.libs/libfabric.so.1"):
            archive.writestr(name, "")
    tagging.program(f"cp {tagging.wheel.with_suffix('.bundled')} {tagging.found}/a-1-cp3-manylinux.whl")
    with pytest.raises(SystemExit, match=r"bundled a\.libs/libfabric\.so\.1:"):
        tagging.result()


def test_what_auditwheel_says_when_it_fails_is_shown(tagging: Tagging) -> None:
    tagging.program("echo no patchelf >&2; exit 1")
    with pytest.raises(SystemExit, match="no patchelf"):
        tagging.result()
