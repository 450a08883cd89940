"""The library installed from a wheel, in a virtual environment of its own and out of the checkout's reach."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path


class Installation:
    """A fresh virtual environment in which nothing but a wheel is installed.

    It finds the packages of the running Python, torch above all, on its path; the library itself it finds only in the
    wheel.

    Parameters
    ----------
    wheel
        The wheel to install, without network.
    folder
        Where the environment and its working folder are created.
    """

    def __init__(self, wheel: Path, folder: Path) -> None:
        self._bin, self._work = folder / "venv" / "bin", folder / "work"
        self._work.mkdir(parents=True)
        self.site = self._create(folder / "venv")
        self.run("python", "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", str(wheel))
        # Only now, since otherwise pip would find the library of the running Python. Unlike that of the running Python,
        # such a folder's own .pth files are not read, so that an editable installation stays unseen.
        others = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
        (self.site / "others.pth").write_text("\n".join(others) + "\n")

    def _create(self, venv: Path) -> Path:
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
        asked = "import sysconfig; print(sysconfig.get_path('purelib'))"
        return Path(subprocess.check_output([venv / "bin" / "python", "-c", asked], text=True).strip())

    def run(self, program: str, *arguments: str, environment: dict[str, str] | None = None) -> str:
        """Run a program of the environment, which must succeed, and return what it printed."""
        inherited = {name: text for name, text in os.environ.items() if not name.startswith(("PYTHON", "DEEP_EP_"))}
        done = subprocess.run(
            [self._bin / program, *arguments],
            cwd=self._work,
            env={**inherited, **(environment or {})},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def run_script(self, script: Path) -> str:
        """Run a copy of a Python script, which thus finds nothing of the checkout beside it."""
        return self.run("python", str(shutil.copy(script, self._work)))
