"""Runs over the stand-in for the driver: the work of the canary's own process, with kernels that are not compiled. Runs
once for each argument "NAME=VALUE", a fault that makes the driver behave badly; without arguments once.
"""

from __future__ import annotations

import json
import os
import sys

import pretend_gpu
from deep_ep_py.device import canary


def main() -> None:
    pretend_gpu.install(compile_kernels=False)
    canary._TIMEOUT_NS *= 2  # other tests keep the CPU busy
    for fault in sys.argv[1:] or [""]:
        name, _, value = fault.partition("=")
        if name:
            os.environ[name] = value
        for finding in canary.look():
            print(json.dumps(finding), flush=True)
        os.environ.pop(name, None)


if __name__ == "__main__":
    main()
