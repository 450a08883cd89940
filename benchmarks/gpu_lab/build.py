"""Builds the extension. Meanwhile another process imports torch: on a machine that has just started, reading its
libraries takes as long as compiling, and every experiment after this one needs them.
"""

from __future__ import annotations

import subprocess
import sys

from benchmarks.gpu_lab.experiments import PYTHON, ROOT


def main() -> int:
    """Build, and return the exit code."""
    reading = subprocess.Popen([PYTHON, "-c", "import torch, cuda.core"], cwd=ROOT)
    built = subprocess.run([PYTHON, "setup.py", "--quiet", "build_ext", "--inplace"], cwd=ROOT)
    return built.returncode or reading.wait()


if __name__ == "__main__":
    sys.exit(main())
