"""Hardware queues of a GPU: kernels of ranks that share a queue would wait for each other, so each rank needs its own.

The CUDA driver takes their number from the environment, and no documentation says when: on opening, on initialization,
or on creation of its context. Therefore the variable is set before the process starts wherever possible. This module
imports nothing that opens the driver.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
from pathlib import Path

VARIABLE, QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS", 32
"""The variable that asks for queues, and the maximum number of queues."""

_log = logging.getLogger("deep_ep_py")
_LIBRARY = "libcuda.so.1"
_NOT_INITIALIZED = 3  # CUDA_ERROR_NOT_INITIALIZED


def began_with_queues() -> bool:
    """Return whether the variable was set when this process started."""
    try:
        environment = Path("/proc/self/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    return f"{VARIABLE}={QUEUES}".encode() in environment


def driver_initialised() -> bool:
    """Return whether anything in this process has initialized the CUDA driver, without opening it."""
    try:
        driver = ctypes.CDLL(_LIBRARY, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:
        return False
    return bool(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != _NOT_INITIALIZED)


def needs_restart() -> bool:
    """Return whether there is a CUDA driver and this process started without the variable."""
    if began_with_queues():
        return False
    try:
        ctypes.CDLL(_LIBRARY)
    except OSError:
        return False
    return True


def restart_with_queues() -> None:
    """Restart this process's program with the variable set, if `needs_restart`.

    Call this before the program does anything else: what it has done by then is lost.
    """
    if not needs_restart():
        return
    sys.stdout.flush()
    sys.stderr.flush()
    environment = {**os.environ, VARIABLE: str(QUEUES)}
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


def provide_hardware_queues() -> None:
    """Ask for the maximum number of queues to the GPU. For libraries, which cannot restart the program.

    Raises
    ------
    RuntimeError
        This process has already used torch's CUDA, with fewer queues.
    """
    import torch

    if os.environ.get(VARIABLE) == str(QUEUES):
        return
    found = f"{VARIABLE}={os.environ.get(VARIABLE)}: expected {QUEUES}, set before this process uses CUDA"
    if torch.cuda.is_initialized():
        raise RuntimeError(f"{found}, so that ranks that share a GPU do not wait for each other's launches")
    if driver_initialised():  # torch.cuda.is_available() does so
        _log.warning("%s; it is set now, which may be too late: ranks that share a GPU may time out", found)
    os.environ[VARIABLE] = str(QUEUES)
