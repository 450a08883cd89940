"""The kernels as PTX, cached between runs because generating it takes longer than most tests."""

from __future__ import annotations

import ctypes
import os
import pickle
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

from deep_ep_py.device.jit import CompiledKernel, Kernel, Shape
from deep_ep_py.device.jit.cache import refuse_if_others_may_write
from deep_ep_py.device.jit.ptx import PtxCache, compile_kernel_as_ptx
from places import ROOT


@cache
def cache_folder() -> Path:
    """Return the folder in which PTX is cached: DEEP_EP_CACHE_DIR's for built files, unless others could write
    there."""
    folder = ROOT / "build"
    folder.mkdir(exist_ok=True)
    try:
        refuse_if_others_may_write(folder)
    except PermissionError:
        folder = Path(mkdtemp(prefix="ptx-"))
    return folder


@cache
def ptx_cache(over_stand_in: bool = False) -> PtxCache:
    """Return the cache. `over_stand_in`: for a process with the stand-in for the driver, which NVRTC must not find."""
    return PtxCache(cache_folder() / "ptx", _compile_elsewhere if over_stand_in else _compile)


def _compile(kernel: Kernel, shape: Shape, architecture: str) -> CompiledKernel:
    load_builtins()
    return compile_kernel_as_ptx(kernel, shape, architecture)


def _compile_elsewhere(kernel: Kernel, shape: Shape, architecture: str) -> CompiledKernel:
    """Compile in a separate process."""
    environment = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
    asked = pickle.dumps((kernel, shape, architecture))
    done = subprocess.run([sys.executable, __file__], input=asked, env=environment, stdout=subprocess.PIPE, check=True)
    made: CompiledKernel = pickle.loads(done.stdout)
    return made


@cache
def load_builtins() -> None:
    """Load the library that NVRTC would open by name alone from its own folder. A sanitizer's runtime intercepts the
    call and would not search that folder.
    """
    from cuda.pathfinder import load_nvidia_dynamic_lib

    found = load_nvidia_dynamic_lib("nvrtc").abs_path
    assert found is not None
    for path in Path(found).parent.glob("libnvrtc-builtins.so.*"):
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


if __name__ == "__main__":
    sys.stdout.buffer.write(pickle.dumps(_compile(*pickle.loads(sys.stdin.buffer.read()))))
