"""Queues to a GPU: kernels of ranks that share one would wait for each other, so there must be one for each rank.

The driver takes their number from the environment, and no documentation says when: when it is opened, initialised, or
makes its context. So the variable is there before the process begins, wherever that can be had. This module imports
nothing that opens the driver.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
from pathlib import Path

VARIABLE, QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS", 32
"""The most queues that there may be, and what asks for them."""

_log = logging.getLogger("deep_ep_py")
_LIBRARY = "libcuda.so.1"
_NOT_INITIALIZED = 3  # CUDA_ERROR_NOT_INITIALIZED


def began_with_queues() -> bool:
    """Tell whether the variable was set when this process began."""
    try:
        environment = Path("/proc/self/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    return f"{VARIABLE}={QUEUES}".encode() in environment


def driver_initialised() -> bool:
    """Tell whether anything in this process has initialised the driver, without opening it."""
    try:
        driver = ctypes.CDLL(_LIBRARY, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:
        return False
    return bool(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != _NOT_INITIALIZED)


def needs_restart() -> bool:
    """Tell whether there is a driver, and this process began without the variable."""
    if began_with_queues():
        return False
    try:
        ctypes.CDLL(_LIBRARY)
    except OSError:
        return False
    return True


def restart_with_queues() -> None:
    """Restart this process's program with the variable set, if `needs_restart`.

    To be called before a program does anything else: what it has done is lost.
    """
    if not needs_restart():
        return
    sys.stdout.flush()
    sys.stderr.flush()
    environment = {**os.environ, VARIABLE: str(QUEUES)}
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


def provide_hardware_queues() -> None:
    """Have as many queues to the GPU as there may be. For libraries, which cannot restart the program.

    Raises
    ------
    RuntimeError
        This process has used torch's CUDA already, with fewer.
    """
    import torch

    if os.environ.get(VARIABLE) == str(QUEUES):
        return
    found = f"{VARIABLE}={os.environ.get(VARIABLE)}: expected {QUEUES}, set before this process uses CUDA"
    if torch.cuda.is_initialized():
        raise RuntimeError(f"{found}, so that ranks that share a GPU do not wait for each other's launches")
    if driver_initialised():  # as torch.cuda.is_available() does
        _log.warning("%s; it is set now, which may be too late: ranks that share a GPU may time out", found)
    os.environ[VARIABLE] = str(QUEUES)
