"""`python -m deep_ep_py shim`: what it installs in an environment, what it removes, and what it leaves alone."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from deep_ep_py.__main__ import main
from places import ROOT

pytestmark = pytest.mark.once


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder that poses as the site-packages folder of the running environment."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    for name in [name for name in sys.modules if name.partition(".")[0] in ("deep_ep", "deep_ep_cpp")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(folder))
    monkeypatch.syspath_prepend(str(folder))
    return folder


def shim(*options: str) -> Result:
    return CliRunner().invoke(main, ["shim", *options])


def files_of(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_install_and_remove(site: Path) -> None:
    (site / "other.py").write_text("")
    assert "not installed" in shim().output and "finds nothing" in shim().output
    assert shim("--remove").output == f"nothing to remove in {site}\n"
    assert shim("--install").output == f"installed in {site}\n"
    assert files_of(site) == ["deep_ep/__init__.py", "deep_ep_cpp.py", "other.py"]
    assert shim("--install").output == f"already installed in {site}\n"
    assert shim().output == f"installed in {site}: `import deep_ep` finds deep_ep_py\n"
    for folder in (site, site / "deep_ep"):  # as other Python versions leave it
        (folder / "__pycache__").mkdir()
    (site / "deep_ep" / "__pycache__" / "__init__.cpython-39.pyc").write_text("")
    assert shim("--remove").output == f"removed from {site}\n"
    assert files_of(site) == ["other.py"] and not (site / "deep_ep").exists()
    assert "not installed" in shim().output


def test_an_older_version_is_replaced(site: Path) -> None:
    shim("--install")
    file = site / "deep_ep_cpp.py"
    source = file.read_text()
    file.write_text(source + "# older\n")
    assert shim("--install").output == f"installed in {site}\n"
    assert file.read_text() == source


@pytest.mark.parametrize("name", ["deep_ep/__init__.py", "deep_ep_cpp.so", "deep_ep_cpp/__init__.py"])
def test_another_one_elsewhere_is_not_shadowed(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    real = (tmp_path / "elsewhere" / name.replace(".so", suffix)).resolve()
    real.parent.mkdir(parents=True)
    real.write_text("")
    monkeypatch.syspath_prepend(str(tmp_path / "elsewhere"))
    result = shim("--install")
    assert result.exit_code == 1 and str(real) in result.output and "not part of deep_ep_py" in result.output
    assert files_of(site) == []
    if name.startswith("deep_ep/"):
        assert shim().output == f"not installed in {site}: `import deep_ep` finds {real}\n"


@pytest.mark.parametrize("name", ["deep_ep/__init__.py", "deep_ep/_C.so", "deep_ep_cpp.py"])
def test_what_is_not_ours_stays(site: Path, name: str) -> None:
    foreign = site / name
    foreign.parent.mkdir(exist_ok=True)
    foreign.write_text("mine = True\n")
    for option in ("--install", "--remove"):
        result = shim(option)
        assert result.exit_code == 1 and "not part of deep_ep_py" in result.output, result.output
        assert files_of(site) == [name] and foreign.read_text() == "mine = True\n"


def test_what_lies_beside_ours_stays(site: Path) -> None:
    shim("--install")
    (site / "deep_ep" / "notes.txt").write_text("mine")
    result = shim("--remove")
    assert result.exit_code == 1 and "notes.txt" in result.output
    assert files_of(site) == ["deep_ep/__init__.py", "deep_ep/notes.txt", "deep_ep_cpp.py"]


def test_a_folder_that_is_not_on_the_path(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != str(site)])
    result = shim("--install")
    assert result.exit_code == 1 and "not on Python's path" in result.output
    assert files_of(site) == []


def test_a_folder_that_cannot_be_written(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (site / "file").write_text("")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(site / "file"))
    result = shim("--install")
    assert result.exit_code == 1 and f"cannot write to {site / 'file'}" in result.output


def test_one_thing_at_a_time(site: Path) -> None:
    assert shim("--install", "--remove").exit_code == 2
    assert files_of(site) == []


IMPORTS = """
import deep_ep_cpp
import importlib.util
assert importlib.util.find_spec("deep_ep") is not None
import deep_ep, deep_ep.utils.math
from deep_ep import Buffer, Config, EventOverlap
from deep_ep.buffer import Buffer as SameBuffer
from deep_ep.utils import EventHandle
from deep_ep.utils.envs import init_dist
from deep_ep.utils.testing import bench
import deep_ep_py
assert Buffer is SameBuffer and issubclass(Buffer, deep_ep_py.Buffer)
assert Config is deep_ep_cpp.Config is deep_ep_py.Config and EventHandle is deep_ep_cpp.EventHandle
assert deep_ep.utils.math.calc_diff is deep_ep.utils.calc_diff
try:
    from deep_ep import ElasticBuffer
except ImportError as error:
    assert "V2" in str(error), error
print("imported", deep_ep.__version__)
"""


@pytest.mark.thorough
def test_in_a_fresh_environment(tmp_path: Path) -> None:
    """Made by `python -m venv --system-site-packages`, so that it sees torch and the other packages of this one."""
    folder = tmp_path / "venv"
    venv.create(folder, system_site_packages=True, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    outer = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (packages / "outer.pth").write_text("\n".join(outer))

    def python(*arguments: str) -> str:
        result = subprocess.run(
            [str(folder / "bin" / "python"), *arguments],
            capture_output=True,
            text=True,
            timeout=300,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        return result.stdout + result.stderr

    assert "installed in" in python("-m", "deep_ep_py", "shim", "--install")
    assert files_of(packages / "deep_ep") == ["__init__.py"]
    assert python("-c", IMPORTS).startswith("imported 1.2.1+deep_ep_py.")
    assert "removed from" in python("-m", "deep_ep_py", "shim", "--remove")
    assert "No module named 'deep_ep'" in python("-c", "import deep_ep")
    assert not (packages / "deep_ep").exists() and not (packages / "deep_ep_cpp.py").exists()
