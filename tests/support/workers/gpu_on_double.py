"""Runs programs meant for a GPU over the stand-in for the driver: "pytest" with its arguments, or another worker.

Torch's GPU work runs on the CPU, and streams impose no order: each call waits for its kernels.
"""

from __future__ import annotations

import runpy
import sys

import pytest

import pretend_gpu
import pretend_torch_cuda


def main() -> None:
    pretend_torch_cuda.install(["the stand-in"])
    pretend_gpu.install(compile_kernels=False)
    program, *arguments = sys.argv[1:]
    if program == "pytest":
        sys.exit(pytest.main([*arguments, "-p", "no:cacheprovider", "-q"]))
    sys.argv = [program, *arguments]
    runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main()
