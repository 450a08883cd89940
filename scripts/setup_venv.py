"""Make the virtual environment that all make targets use. Needs nothing but the user's Python, which runs it.

If this Python can import torch, that torch is used as is; otherwise one is installed. The script does nothing if the
environment is ready and neither pyproject.toml nor this file has changed since. An existing environment is completed,
never replaced.

With --runtime it installs only what building and running the library takes. Another call without it adds the rest: what
the tests, the linters and the stubs need.

With --build it compiles the extension while packages are installed, for a target whose next step needs it.

With --clang it also finds a clang++ with ThreadSanitizer, or installs one from pip if the system has none: half of what
the tests can find needs one.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TORCH = "torch==2.13.0"
CLANG = "ziglang>=0.17"  # as pyproject.toml has it
# NVSHMEM's bindings, for tests over a stand-in for its library: without the library itself, which has some hundred MB.
NVSHMEM = "nvshmem4py-cu13==0.4.1"
# The extras of pyproject.toml that are installed: the demo and the training example draw plots.
RUNTIME_EXTRA, TEST_EXTRA = "plot", "test"


def run(*command: str | Path) -> None:
    print("+", *command, flush=True)
    # This only makes the package importable. The next step compiles it, which may fail.
    environment = {**os.environ, "DEEP_EP_BUILDS": "none"}
    subprocess.run([str(part) for part in command], cwd=ROOT, env=environment, check=True)


def imports(python: Path, module: str) -> bool:
    return subprocess.run([python, "-c", f"import {module}"], cwd=ROOT, capture_output=True).returncode == 0


def torch_folder() -> Path | None:
    """Return the folder on sys.path that holds a working torch of this Python, or None."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None or not imports(Path(sys.executable), "torch"):
        return None
    return Path(spec.origin).parent.parent


def create(venv: Path) -> None:
    folder = torch_folder()
    system = ["--system-site-packages"] if folder else []
    try:
        run(sys.executable, "-m", "venv", *system, venv)
    except subprocess.CalledProcessError:
        sys.exit(f"cannot create {venv}: on Debian and Ubuntu, install python3-venv")
    python = venv / "bin" / "python"
    if folder and not imports(python, "torch"):
        # This Python is in an environment itself: its packages are not those of the system, so name their folder.
        site = subprocess.check_output(
            [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True
        )
        Path(site.strip(), "outer_torch.pth").write_text(f"{folder}\n")


def pip_of(python: Path) -> tuple[str | Path, ...]:
    return (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")


def complete(venv: Path, extra: str, build: bool) -> None:
    """Install the build's requirements, torch, and the package with one of its extras; compile meanwhile if asked to.

    Compilers keep all cores busy, pip mostly one. If the compilation fails, so will the next step, which says why.
    """
    python = venv / "bin" / "python"
    pip = pip_of(python)
    run(*pip, "setuptools>=77", "pybind11>=2.12")
    command = [python, "setup.py", "--quiet", "build_ext", "--inplace"]
    compiling = subprocess.Popen(command, cwd=ROOT, start_new_session=True) if build else None
    try:
        if not imports(python, "torch"):
            run(*pip, TORCH)
        run(*pip, "--no-build-isolation", "--editable", f".[{extra}]")
        if compiling is not None:
            compiling.wait()
    except BaseException:
        if compiling is not None:
            os.killpg(compiling.pid, signal.SIGKILL)
            compiling.wait()
        raise


def complete_for_tests(venv: Path) -> None:
    """Install what tests need and no extra brings."""
    python = venv / "bin" / "python"
    pip = pip_of(python)
    # pip and imports find packages of an outer environment, but the search for NVRTC's library does not.
    loads_nvrtc = [python, "-c", "from cuda.bindings import nvrtc; nvrtc.nvrtcVersion()"]
    if subprocess.run(loads_nvrtc, cwd=ROOT, capture_output=True).returncode != 0:
        run(*pip, "--ignore-installed", "--no-deps", "nvidia-cuda-nvrtc")
    try:
        run(*pip, "--no-deps", NVSHMEM)
    except subprocess.CalledProcessError:
        print("no nvshmem4py for this Python: what needs it is skipped", flush=True)


def need_clang(venv: Path) -> None:
    """Install a clang++ if there is none. If that fails, tests that need one are skipped with a message."""
    if os.environ.get("CLANGXX"):  # if that cannot be used, the build says why
        return
    python = venv / "bin" / "python"
    found = "import sys, toolchain; sys.exit(toolchain.find_clang(toolchain.Path('build')) is None)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "scripts")}
    if subprocess.run([python, "-c", found], cwd=ROOT, env=environment).returncode == 0:
        return
    try:
        run(*pip_of(python), CLANG)
    except subprocess.CalledProcessError:
        print("no clang++ can be installed: what needs one is skipped", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("venv", type=Path)
    parser.add_argument("--clang", action="store_true", help="also provide a clang++")
    parser.add_argument("--runtime", action="store_true", help="leave out what only tests, linters and stubs need")
    parser.add_argument("--build", action="store_true", help="compile the extension while packages are installed")
    options = parser.parse_args()
    venv = Path(os.path.abspath(options.venv))
    wanted = hashlib.sha256((ROOT / "pyproject.toml").read_bytes() + Path(__file__).read_bytes()).hexdigest()
    full, runtime = venv / ".ready", venv / ".ready-runtime"
    stamps = (full, runtime) if options.runtime else (full,)  # the full set contains the other
    with Path(f"{venv}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not any(stamp.exists() and stamp.read_text() == wanted for stamp in stamps):
            if not (venv / "bin" / "python").exists():
                create(venv)
            complete(venv, RUNTIME_EXTRA if options.runtime else TEST_EXTRA, options.build)
            if not options.runtime:
                complete_for_tests(venv)
            stamps[-1].write_text(wanted)
        if options.clang:
            need_clang(venv)


if __name__ == "__main__":
    main()
